// Devices, their limited memory, pinned host memory, random numbers.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace sim {
namespace {

std::mutex lock;
std::map<const void*, std::pair<size_t, int>> blocks;  // device memory: size, device
std::map<const void*, size_t> pinned;                  // pinned host memory: size
Memory usage[64];
thread_local int current = 0;

void* host_block(size_t size) {
  void* data = nullptr;
  if (posix_memalign(&data, 64, size) != 0) fail("the host has no memory left for a simulated device");
  return data;
}

void free_device(void* data) {
  if (data == nullptr) return;
  forget(data);
  {
    std::lock_guard<std::mutex> held(lock);
    auto block = blocks.find(data);
    usage[block->second.second].allocated -= static_cast<int64_t>(block->second.first);
    blocks.erase(block);
  }
  std::free(data);
}

std::string megabytes(int64_t bytes) {
  return std::to_string(bytes >> 20) + " MiB";
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(current));
    if (size == 0) return {nullptr, nullptr, &free_device, device};
    std::lock_guard<std::mutex> held(lock);
    Memory& use = usage[current];
    const int64_t limit = options().memory_bytes;
    TORCH_CHECK(options().fault != "memory" || use.allocated + static_cast<int64_t>(size) <= limit, "no memory");
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        use.allocated + static_cast<int64_t>(size) <= limit,
        options().name, ":", current, " out of memory. Tried to allocate ", megabytes(size), ". The device has a total of ",
        megabytes(limit), " of which ", megabytes(limit - use.allocated), " is free.");
    void* data = host_block(size);
    blocks[data] = {size, current};
    use.allocated += static_cast<int64_t>(size);
    use.peak = std::max(use.peak, use.allocated);
    return {data, data, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_device;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
};

void free_pinned(void* data) {
  if (data == nullptr) return;
  forget(data);
  {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase(data);
  }
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::kCPU)};
    void* data = host_block(size);
    std::lock_guard<std::mutex> held(lock);
    pinned[data] = size;
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

// torch's CPU generator under a device's name: the same numbers, a state of its own.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(int device, at::Generator own = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(own) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return kType; }
  at::Generator inner;

 private:
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device_.index(), inner.clone()); }
};

std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < 64; i++) made.push_back(at::make_generator<DeviceGenerator>(i));
    return made;
  }();
  return all;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return options().device_count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return device < options().device_count; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(options().device_count); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int before = current;
    set_current_device(device);
    return static_cast<c10::DeviceIndex>(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void* data) const override {
    std::lock_guard<std::mutex> held(lock);
    auto after = blocks.upper_bound(data);
    return {kType, static_cast<c10::DeviceIndex>(after == blocks.begin() ? 0 : std::prev(after)->second.second)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return generators()[check_device(device)];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(check_device(device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::DataPtr data;
    if (size != 0) {
      const int before = current;
      current = storage.device().index();
      data = device_allocator.allocate(size);
      current = before;
      if (storage.data() != nullptr) std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    } else {
      data = {nullptr, nullptr, &free_device, storage.device()};
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

Hooks hooks;
const bool registered = [] {
  c10::SetAllocator(kType, &device_allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

Options& options() {
  static Options all;
  return all;
}

void fail(const std::string& message) {
  TORCH_CHECK(false, message);
  std::abort();
}

Memory memory(int device) {
  std::lock_guard<std::mutex> held(lock);
  return usage[device];
}

void reset_peak(int device) {
  std::lock_guard<std::mutex> held(lock);
  usage[device].peak = usage[device].allocated;
}

int current_device() {
  return current;
}

int check_device(int device) {
  const int count = options().device_count;
  if (device == -1) device = current;
  if (device < 0 || device >= count)
    fail("invalid device ordinal " + std::to_string(device) + ": this process sees " + std::to_string(count) + " " +
         options().name + " device(s)");
  return device;
}

void set_current_device(int device) {
  current = check_device(device);
}

at::Generator generator(int device) {
  return generators()[device];
}

at::Generator host_generator(const at::Generator& device_generator) {
  return static_cast<DeviceGenerator*>(device_generator.unsafeGetGeneratorImpl())->inner;
}

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(lock);
  auto after = pinned.upper_bound(data);
  if (after == pinned.begin()) return false;
  auto block = std::prev(after);
  return static_cast<const char*>(data) < static_cast<const char*>(block->first) + block->second;
}

}  // namespace sim
