// What Python sees of the chip, and its collective library: gloo on the same memory, under a name of its own.
#include "sim.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;
using c10d::Backend;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

namespace sim {
namespace {

class Collectives final : public Backend {
 public:
  Collectives(c10::intrusive_ptr<Backend> inner, std::string name)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& how) override {
    auto own = host(tensors, true);
    return inner_->broadcast(own, how);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& how) override {
    auto own = host(tensors, true);
    if (sim::options().fault == "all_reduce") own[0].add_(1);
    return inner_->allreduce(own, how);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& how) override {
    auto own = host(tensors, true);
    return inner_->allreduce_coalesced(own, how);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& how) override {
    auto own = host(tensors, true);
    return inner_->reduce(own, how);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& how) override {
    auto into = host(outputs, true);
    auto own = host(inputs, false);
    return inner_->allgather(into, own, how);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& how) override {
    auto into = host(output, true), own = host(input, false);
    return inner_->_allgather_base(into, own, how);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& how) override {
    auto into = host(outputs, true), own = host(inputs, false);
    return inner_->allgather_into_tensor_coalesced(into, own, how);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& how) override {
    auto into = host(outputs, true);
    auto own = host(inputs, false);
    return inner_->gather(into, own, how);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& how) override {
    auto into = host(outputs, true);
    auto own = host(inputs, false);
    return inner_->scatter(into, own, how);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& how) override {
    auto into = host(outputs, true);
    auto own = host(inputs, false);
    return inner_->reduce_scatter(into, own, how);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& how) override {
    auto into = host(output, true), own = host(input, false);
    return inner_->_reduce_scatter_base(into, own, how);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& how) override {
    auto into = host(outputs, true), own = host(inputs, false);
    return inner_->reduce_scatter_tensor_coalesced(into, own, how);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& how) override {
    auto into = host(output, true), own = host(input, false);
    return inner_->alltoall_base(into, own, output_sizes, input_sizes, how);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& how) override {
    auto into = host(outputs, true), own = host(inputs, false);
    return inner_->alltoall(into, own, how);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto own = host(tensors, false);
    return inner_->send(own, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto own = host(tensors, true);
    return inner_->recv(own, from, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    auto own = host(tensors, true);
    return inner_->recvAnysource(own, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& how) override {
    synchronize_all();
    return inner_->barrier(how);
  }

 private:
  // As work of the current stream: what the stream holds is done before gloo's threads touch the memory.
  at::Tensor host(const at::Tensor& tensor, bool write) const {
    TORCH_CHECK(tensor.device().type() == kType, name_, ": no backend for ", tensor.device(), " tensors, only for ",
                sim::options().name);
    launch(tensor.device().index(), {{tensor.storage().data(), write}});
    return host_view(tensor);
  }
  Tensors host(const Tensors& tensors, bool write) const {
    Tensors views;
    for (const at::Tensor& tensor : tensors) views.push_back(host(tensor, write));
    return views;
  }
  TensorLists host(const TensorLists& lists, bool write) const {
    TensorLists views;
    for (const Tensors& tensors : lists) views.push_back(host(tensors, write));
    return views;
  }

  c10::intrusive_ptr<Backend> inner_;
  std::string name_;
};

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace sim;
  module.def("configure", [](std::string name, int count, int64_t memory, bool bf16, double speed, double lag, bool strict) {
    options() = {std::move(name), count, memory, bf16, speed, lag, "", strict};
  });
  module.def("default_generator", [](int device) { return generator(check_device(device)); });
  module.def("set_strict", [](bool strict) { options().strict = strict; });
  module.def("set_fault", [](std::string fault) { options().fault = std::move(fault); });
  module.def("set_bf16", [](bool bf16) { options().bf16 = bf16; });
  module.def("set_copy_engine", [](double speed, double lag) {
    options().copy_bytes_per_s = speed;
    options().lag_s = lag;
  });
  module.def("current_device", [] { return check_device(-1); });
  module.def("set_device", [](int device) { set_current_device(device); });
  module.def("synchronize", [](int device) { synchronize_device(device); }, py::call_guard<py::gil_scoped_release>());
  module.def("memory", [](int device) {
    const Memory use = memory(check_device(device));
    return py::make_tuple(use.allocated, use.peak);
  });
  module.def("reset_peak", [](int device) { reset_peak(check_device(device)); });
  module.def("check_host", [](const at::Tensor& tensor, bool write) {
    check_host(tensor.data_ptr(), static_cast<int64_t>(tensor.nbytes()), write);
  });
  module.def("take_trace", [] {
    py::list spans;
    for (const Span& span : take_trace())
      spans.append(py::make_tuple(span.device, span.stream, span.engine, span.bytes, span.start, span.end));
    return spans;
  });
  module.def("collectives", [](c10::intrusive_ptr<Backend> inner, std::string name) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<Collectives>(std::move(inner), std::move(name));
  });
}
