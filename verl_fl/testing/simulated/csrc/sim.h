// A chip made of host memory, as PyTorch's PrivateUse1 device. What the four source files share.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim {

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct Options {
  std::string name;           // what the device type is called, for messages
  int device_count = 1;       // devices this process may see
  int64_t memory_bytes = 0;   // of each device
  bool bf16 = true;           // whether bfloat16 tensors can exist
  double copy_bytes_per_s = 0;  // of each copy engine (one a direction and device); 0: as fast as memcpy
  double lag_s = 0.002;       // what work on a side stream waits before it starts
  std::string fault;          // what is broken, for tests of tests: an operator's name, "copies", "all_reduce", "memory"
  bool strict = true;         // raise where a stream or the host uses what another stream may still be writing
};
Options& options();
[[noreturn]] void fail(const std::string& message);

// --- memory.cpp: devices, memory, generators -----------------------------------------------------------------------
struct Memory {
  int64_t allocated = 0, peak = 0;
};
Memory memory(int device);
void reset_peak(int device);
int current_device();
void set_current_device(int device);
int check_device(int device);  // -1: the current one; raises when it does not exist
at::Generator generator(int device);
at::Generator host_generator(const at::Generator& device_generator);
bool is_pinned(const void* data);

// --- streams.cpp: work that runs later, and who has waited for whom ------------------------------------------------
struct Access {
  const void* data;  // start of the storage
  bool write;
};
enum class Engine { none, to_device, to_host };

// Queue ``run`` on the current stream of ``device``; it takes ``bytes`` through ``engine``.
void submit(int device, std::function<void()> run, Engine engine, int64_t bytes, const std::vector<Access>& accesses);
// Wait for what the current stream of ``device`` holds, then account for work that the caller does itself.
void launch(int device, const std::vector<Access>& accesses);
// The host waits for the current stream and from now on knows all that the stream knows.
void synchronize_current(int device);
void synchronize_device(int device);
void synchronize_all();
bool on_default_stream(int device);
// Raise where a stream may still write (or, for ``write``, read) this host memory, as far as the host has waited.
void check_host(const void* data, int64_t bytes, bool write);
void host_access(const void* data, int64_t bytes, bool write, int device);  // by the work submitted last
void forget(const void* data);                                              // its memory is free again
struct Span {
  int device;
  int64_t stream;
  std::string engine;
  int64_t bytes;
  double start, end;  // seconds of one monotonic clock
};
std::vector<Span> take_trace();

// --- operators.cpp -------------------------------------------------------------------------------------------------
at::Tensor host_view(const at::Tensor& tensor);  // the same memory, as a CPU tensor

}  // namespace sim
