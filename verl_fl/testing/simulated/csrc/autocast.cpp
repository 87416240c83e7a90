// torch.autocast for the device, by torch's own lists of operators.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_PRECISION_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST_TYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FULL_PRECISION)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_PRECISION_RESULT)
  AT_FORALL_PROMOTE(WIDEST_TYPE)
}

}  // namespace at::autocast
