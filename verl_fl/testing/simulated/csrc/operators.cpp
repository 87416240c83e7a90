// Operators: memory layout and copies by hand, everything else on the CPU.
#include "sim.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace sim {
namespace {

// While an operator runs on the CPU in a device operator's place, its copies are part of it.
thread_local bool inside = false;
struct Inside {
  bool before = inside;
  Inside() { inside = true; }
  ~Inside() { inside = before; }
};

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

Access use(const at::Tensor& tensor, bool write) {
  return {tensor.storage().data(), write};
}

void check_dtype(c10::ScalarType dtype) {
  TORCH_CHECK(options().bf16 || dtype != at::kBFloat16, options().name, " has no bfloat16");
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  const auto type = c10::dtype_or_default(dtype);
  check_dtype(type);
  check_device(current_device());
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), c10::GetAllocator(kType),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  const auto type = c10::dtype_or_default(dtype);
  check_dtype(type);
  check_device(current_device());
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           c10::GetAllocator(kType),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__))
                                                  : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset.guard_int(__FILE__, __LINE__),
                                      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage_whole(at::Tensor& self, at::Storage source) {
  const int64_t length = static_cast<int64_t>(source.nbytes()) / static_cast<int64_t>(self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {length}, {});
}

void raw_copy(const at::Tensor& target, const at::Tensor& source) {
  at::AutoDispatchBelowADInplaceOrView guard;
  host_view(target).copy_(host_view(source));
  if (options().fault == "copies" && target.scalar_type() == at::kShort) host_view(target).add_(1);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (inside) {
    raw_copy(target, source);
    return target;
  }
  const bool from = on_device(source), to = on_device(target);
  const int device = from ? source.device().index() : target.device().index();
  if (from && to && source.device() != target.device()) synchronize_device(target.device().index());
  std::vector<Access> accesses;
  if (from) accesses.push_back(use(source, false));
  if (to) accesses.push_back(use(target, true));

  const at::Tensor& host = from ? target : source;
  const Engine engine = from && to ? Engine::none : (from ? Engine::to_host : Engine::to_device);
  // Like other chips: only pinned host memory can be copied while its owner goes on.
  const bool waits = engine != Engine::none && (!non_blocking || !is_pinned(host.storage().data()));
  const int64_t bytes = static_cast<int64_t>(target.nbytes());
  if (engine == Engine::none && on_default_stream(device)) {
    launch(device, accesses);
    raw_copy(target, source);
    return target;
  }
  submit(device, [source, target] { raw_copy(target, source); }, engine, bytes, accesses);
  if (waits) synchronize_current(device);
  else if (engine != Engine::none)
    host_access(host.storage().data(), static_cast<int64_t>(host.storage().nbytes()), from, device);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  if (!inside) {
    launch(self.device().index(), {use(self, false)});
    synchronize_current(self.device().index());
  }
  return host_view(self).item();
}

// Lets ``parameter.data = tensor`` move a parameter between the host and the device, as for the devices torch knows.
bool compatible(const at::Tensor&, const at::Tensor&) {
  return true;
}

void record_stream(at::Tensor&, c10::Stream) {}  // a queued task holds what it uses

// Tensors of an argument, lists and optionals included.
template <typename Visit>
void each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor() && value.toTensor().defined()) visit(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  else if (value.isList())
    for (const c10::IValue& item : value.toListRef()) each_tensor(item, visit);
}

bool takes_host_indices(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 || name == "aten::_unsafe_index";
}

// The operator's device; raises where its tensors are on several, host tensors with dimensions included.
int common_device(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  int device = -1;
  bool host = false;
  for (const c10::IValue& argument : arguments)
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) {
        if (tensor.device().is_cpu() && tensor.dim() > 0) host = true;
      } else if (device == -1) {
        device = tensor.device().index();
      } else if (device != tensor.device().index()) {
        fail("Expected all tensors to be on the same device, but found at least two devices, " + options().name + ":" +
             std::to_string(device) + " and " + tensor.device().str() + "! (" + op.schema().name() + ")");
      }
    });
  if (device != -1 && host && !takes_host_indices(op.schema().name()))
    fail("Expected all tensors to be on the same device, but found at least two devices, " + options().name + ":" +
         std::to_string(device) + " and cpu! (" + op.schema().name() + ")");
  return device == -1 ? current_device() : device;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& parameters = op.schema().arguments();
  const auto arguments = torch::jit::last(*stack, parameters.size());
  const int device = common_device(op, arguments);
  std::vector<Access> accesses;
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto* alias = parameters[i].alias_info();
    const bool write = alias != nullptr && alias->isWrite();
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (on_device(tensor) && tensor.storage().data() != nullptr) accesses.push_back(use(tensor, write));
    });
    // Random numbers come from the device's own generator.
    if (parameters[i].type()->str() == "Generator?" || parameters[i].type()->str() == "Generator") {
      auto& slot = (*stack)[stack->size() - parameters.size() + i];
      slot = host_generator(slot.isNone() ? generator(device) : slot.toGenerator());
    }
  }
  if (!inside) launch(device, accesses);
  const c10::DeviceGuard guard(c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
  const Inside scope;
  at::native::cpu_fallback(op, stack);
  if (op.schema().name() == options().fault)
    for (const c10::IValue& result : torch::jit::last(*stack, op.schema().returns().size()))
      if (result.isTensor() && on_device(result.toTensor())) host_view(result.toTensor()).add_(1);
}

}  // namespace

at::Tensor host_view(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [kept = tensor.storage()](void*) {}, options,
                       at::Device(at::kCPU));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_storage_whole);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("_has_compatible_shallow_copy_type", &compatible);
  library.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace sim
