// Streams whose work really runs later, copy engines with a speed, and the record of who has waited for whom.
//
// A stream is a queue and a thread. Copies and events go through the queue. Every other operator waits for its stream's
// queue and runs in its caller's thread, which is one legal order of a stream; what is lost by that, a data race between
// two streams that happens to end well, strict mode finds with vector clocks.
#include <Python.h>

#include "sim.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace sim {
namespace {

using Clock = std::map<std::pair<int, int64_t>, int64_t>;  // (device, stream) -> number of its last known work

void merge(Clock& into, const Clock& other) {
  for (const auto& [key, number] : other) into[key] = std::max(into[key], number);
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void pause(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// For as long as it lives, this thread holds no GIL: who waits for a stream may have been called with it, and the
// stream's thread needs it to release a tensor that Python knows. Stands before the lock, so that it ends after it.
struct WithoutGil {
  PyThreadState* held = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (held != nullptr) PyEval_RestoreThread(held);
  }
};

struct Task {
  std::function<void()> run;
  Engine engine;
  int64_t bytes;
};

struct StreamState {
  int device;
  int64_t id;
  int64_t number = 0;  // of the work submitted last
  Clock known;         // work of others that this stream's next work comes after
  std::deque<Task> queue;
  bool busy = false, started = false;
};

struct EventState {
  Clock snapshot;
  bool recorded = false, done = false;
  double time = 0;
};

struct Use {
  std::pair<int, int64_t> stream;
  int64_t number;
};
struct Uses {
  std::vector<Use> reads;
  std::vector<Use> writes;
  int64_t bytes = 0;  // of host memory; 0: a device storage
};

std::mutex& lock = *new std::mutex;  // leaked, like the threads: they outlive static destruction
std::condition_variable& changed = *new std::condition_variable;
std::map<std::pair<int, int64_t>, StreamState*> streams;
std::map<const void*, Uses> uses;
Clock host;
std::vector<Span> trace;
std::mutex engines[64][2];
int64_t next_id = 1;
thread_local int64_t current_id[64] = {};

StreamState& stream_of(int device, int64_t id) {
  auto& entry = streams[{device, id}];
  if (entry == nullptr) entry = new StreamState{device, id};
  return *entry;
}

std::string name_of(const std::pair<int, int64_t>& stream) {
  return "stream " + std::to_string(stream.second) + " of " + options().name + ":" + std::to_string(stream.first);
}

void through_engine(const StreamState& stream, const Task& task) {
  if (stream.id != 0) pause(options().lag_s);
  if (task.engine == Engine::none) {
    task.run();
    return;
  }
  const bool out = task.engine == Engine::to_host;
  std::lock_guard<std::mutex> turn(engines[stream.device][out]);
  const double start = now(), speed = options().copy_bytes_per_s;
  task.run();
  pause(speed > 0 ? task.bytes / speed - (now() - start) : 0);
  std::lock_guard<std::mutex> held(lock);
  trace.push_back({stream.device, stream.id, out ? "to_host" : "to_device", task.bytes, start, now()});
}

void work(StreamState* stream) {
  std::unique_lock<std::mutex> held(lock);
  for (;;) {
    changed.wait(held, [&] { return !stream->queue.empty(); });
    {
      Task task = std::move(stream->queue.front());
      stream->queue.pop_front();
      stream->busy = true;
      held.unlock();
      through_engine(*stream, task);
    }  // what the task kept alive is released without the lock
    held.lock();
    stream->busy = false;
    changed.notify_all();
  }
}

void push(StreamState& stream, Task task) {
  if (!stream.started) {
    stream.started = true;
    std::thread(work, &stream).detach();
  }
  stream.queue.push_back(std::move(task));
  changed.notify_all();
}

bool idle(const StreamState& stream) {
  return stream.queue.empty() && !stream.busy;
}

void drain(std::unique_lock<std::mutex>& held, const StreamState& stream) {
  changed.wait(held, [&] { return idle(stream); });
}

void host_learns(const StreamState& stream) {
  merge(host, stream.known);
  host[{stream.device, stream.id}] = stream.number;
}

const Use* unordered(const std::vector<Use>& list, const std::pair<int, int64_t>& self, const Clock& known) {
  for (const Use& use : list) {
    if (use.stream == self) continue;
    auto seen = known.find(use.stream);
    if (seen == known.end() || seen->second < use.number) return &use;
  }
  return nullptr;
}

// Number the stream's next work, after checking that what it uses is not in use elsewhere.
void account(StreamState& stream, const std::vector<Access>& accesses) {
  const std::pair<int, int64_t> self{stream.device, stream.id};
  merge(stream.known, host);
  if (options().strict) {
    for (const Access& access : accesses) {
      auto found = uses.find(access.data);
      if (found == uses.end()) continue;
      const Use* other = unordered(found->second.writes, self, stream.known);
      const char* doing = "writing";
      if (other == nullptr && access.write) {
        other = unordered(found->second.reads, self, stream.known);
        doing = "reading";
      }
      if (other != nullptr)
        fail("strict: " + name_of(self) + (access.write ? " writes" : " reads") + " a tensor that " + name_of(other->stream) +
             " may still be " + doing + "; wait for it first (wait_stream, an event, or synchronize)");
    }
  }
  ++stream.number;
  for (const Access& access : accesses) {
    Uses& all = uses[access.data];
    if (access.write) {
      all.writes = {{self, stream.number}};
      all.reads.clear();
    } else {
      std::erase_if(all.reads, [&](const Use& use) { return use.stream == self; });
      all.reads.push_back({self, stream.number});
    }
  }
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream wrap(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(device)), id);
  }
  static StreamState& state(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }
  static std::shared_ptr<EventState>& state(void* event) { return *static_cast<std::shared_ptr<EventState>*>(event); }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < options().device_count) set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(options().device_count); }

  c10::Stream getStream(c10::Device device) const override {
    const int index = check_device(device.index());
    return wrap(index, current_id[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return wrap(check_device(device.index()), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    std::lock_guard<std::mutex> held(lock);
    return wrap(check_device(device.index()), next_id++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_id[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> held(lock);
    if (!idle(state(stream))) return false;
    host_learns(state(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const WithoutGil gil;
    std::unique_lock<std::mutex> held(lock);
    drain(held, state(stream));
    host_learns(state(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new std::shared_ptr<EventState>;
    auto made = std::make_shared<EventState>();
    state(*event) = made;
    std::lock_guard<std::mutex> held(lock);
    StreamState& on = state(stream);
    merge(on.known, host);
    made->snapshot = on.known;
    made->snapshot[{on.device, on.id}] = on.number;
    made->recorded = true;
    if (idle(on)) {
      made->done = true;
      made->time = now();
      return;
    }
    push(on, {[made] {
                std::lock_guard<std::mutex> inner(lock);
                made->done = true;
                made->time = now();
              },
              Engine::none, 0});
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const auto waited = state(event);
    std::lock_guard<std::mutex> held(lock);
    StreamState& on = state(stream);
    merge(on.known, waited->snapshot);
    if (waited->done) return;
    push(on, {[waited] {
                std::unique_lock<std::mutex> inner(lock);
                changed.wait(inner, [&] { return waited->done; });
              },
              Engine::none, 0});
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    std::lock_guard<std::mutex> held(lock);
    if (state(event)->done) merge(host, state(event)->snapshot);
    return state(event)->done;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const auto waited = state(event);
    const WithoutGil gil;
    std::unique_lock<std::mutex> held(lock);
    changed.wait(held, [&] { return waited->done; });
    merge(host, waited->snapshot);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return (state(second)->time - state(first)->time) * 1e3;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<std::shared_ptr<EventState>*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

void submit(int device, std::function<void()> run, Engine engine, int64_t bytes, const std::vector<Access>& accesses) {
  std::lock_guard<std::mutex> held(lock);
  StreamState& stream = stream_of(device, current_id[device]);
  account(stream, accesses);
  push(stream, {std::move(run), engine, bytes});
}

void launch(int device, const std::vector<Access>& accesses) {
  const WithoutGil gil;
  std::unique_lock<std::mutex> held(lock);
  StreamState& stream = stream_of(device, current_id[device]);
  account(stream, accesses);
  drain(held, stream);
}

void synchronize_current(int device) {
  const WithoutGil gil;
  std::unique_lock<std::mutex> held(lock);
  StreamState& stream = stream_of(device, current_id[device]);
  drain(held, stream);
  host_learns(stream);
}

void synchronize_device(int device) {
  const WithoutGil gil;
  std::unique_lock<std::mutex> held(lock);
  device = check_device(device);
  for (auto& [key, stream] : streams) {
    if (key.first != device) continue;
    drain(held, *stream);
    host_learns(*stream);
  }
}

void synchronize_all() {
  for (int device = 0; device < options().device_count; device++) synchronize_device(device);
}

bool on_default_stream(int device) {
  return current_id[device] == 0;
}

void host_access(const void* data, int64_t bytes, bool write, int device) {
  std::lock_guard<std::mutex> held(lock);
  StreamState& stream = stream_of(device, current_id[device]);
  Uses& all = uses[data];
  all.bytes = bytes;
  (write ? all.writes : all.reads).push_back({{stream.device, stream.id}, stream.number});
}

void check_host(const void* data, int64_t bytes, bool write) {
  std::lock_guard<std::mutex> held(lock);
  const char* start = static_cast<const char*>(data);
  for (const auto& [at, all] : uses) {
    const char* begin = static_cast<const char*>(at);
    if (all.bytes == 0 || begin >= start + bytes || start >= begin + all.bytes) continue;
    const Use* other = unordered(all.writes, {-1, -1}, host);
    const char* doing = "writing";
    if (other == nullptr && write) {
      other = unordered(all.reads, {-1, -1}, host);
      doing = "reading";
    }
    if (other != nullptr)
      fail("strict: the host " + std::string(write ? "writes" : "reads") + " memory that " + name_of(other->stream) +
           " may still be " + doing + "; synchronize the stream or an event first");
  }
}

void forget(const void* data) {
  std::lock_guard<std::mutex> held(lock);
  uses.erase(data);
}

std::vector<Span> take_trace() {
  std::lock_guard<std::mutex> held(lock);
  std::vector<Span> taken;
  taken.swap(trace);
  return taken;
}

}  // namespace sim
