// A stand-in of CUDA's driver in host memory, for tests: the functions of libcuda.so.1 that the
// project's two layers of a device call, with the driver's rules. It is not a GPU.
//
// It is stricter than a driver where that finds mistakes: what is put on a stream is done when
// somebody waits for it, so that whoever reads too early reads old bytes; device memory cannot be
// read by the host, ends at a page that nobody may touch, and holds NaN at first; copies take
// page-locked memory alone; there is no default stream. Kernels are the project's own, compiled for
// the host (`kernels.h`); an illegal access in one ends the context, as on a device.

#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

enum Code {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  MISALIGNED_ADDRESS = 716,
  LAUNCH_FAILED = 719,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_WRONG_THREAD = 908,
};

struct Text {
  const char *name, *what;
};

const std::map<int, Text> TEXTS = {
    {SUCCESS, {"CUDA_SUCCESS", "no error"}},
    {INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {NOT_INITIALIZED, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
    {NO_DEVICE, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
    {INVALID_DEVICE, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
    {INVALID_IMAGE, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {INVALID_CONTEXT, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {INVALID_HANDLE, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
    {NOT_FOUND, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {NOT_READY, {"CUDA_ERROR_NOT_READY", "device not ready"}},
    {ILLEGAL_ADDRESS,
     {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {MISALIGNED_ADDRESS, {"CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"}},
    {LAUNCH_FAILED, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
    {NOT_SUPPORTED, {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
    {CAPTURE_UNSUPPORTED,
     {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
      "operation not permitted when stream is capturing"}},
    {CAPTURE_INVALIDATED,
     {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
      "operation failed due to a previous error during capture"}},
    {CAPTURE_WRONG_THREAD,
     {"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
      "attempt to terminate a thread-local capture sequence from another thread"}},
};

// After these a context does nothing any more
const std::set<int> STICKY = {ILLEGAL_ADDRESS, MISALIGNED_ADDRESS, LAUNCH_FAILED};

const size_t ALIGNMENT = 256, PARAMETER_BYTES = 4096;
const unsigned char POISON = 0xFF;  // NaN in every floating-point type
const int NAME_BYTES = 256, CU_MAJOR = 75, CU_MINOR = 76, CU_MAX_PITCH = 11;
const size_t MAX_PITCH = 2147483647;
const int DEVICE_MEMORY = 2;

struct Block {
  size_t size;
  char* pages;  // with one before and one behind that nobody may touch
  size_t length;
};

using Work = std::function<int()>;

struct Graph {
  std::vector<Work> work;
};

struct Stream {
  std::deque<Work> work;
  std::unique_ptr<Graph> captured;
  bool broken = false;
  std::thread::id by;
};

struct Event {
  Stream* stream = nullptr;
  bool reached = false;
  double ms = 0;
};

struct Module {
  void* library;
};

// What `kernels.h` makes of a kernel
using Runner = int (*)(const void* structure, const unsigned* grid, const unsigned* block,
                       unsigned seed);

struct Function {
  Runner run;
  size_t bytes;
};

struct Fault {
  int after, code;
};

std::recursive_mutex lock;
bool initialized = false;
int devices = 1, lost = SUCCESS, retained = 0;
char context;  // the primary one: its address is the handle
size_t limit = size_t{8} << 30;
unsigned order = 0;  // of a kernel's blocks and threads; 0: as they are counted
std::map<uintptr_t, Block> memory;
std::map<uintptr_t, size_t> pinned;
std::set<Stream*> streams;
std::set<Event*> events;
std::set<Graph*> graphs, executables;
std::set<Module*> modules;
std::set<Function*> functions;
std::map<std::string, Fault> faults;
std::vector<std::string> calls, complaints;
std::vector<char> last_structure;  // of the last launch
thread_local std::vector<void*> current;  // contexts

// ---- a call

// Notes a call with its arguments. `code` says why it cannot be made.
struct Call {
  std::string name;
  int code = SUCCESS;
  std::lock_guard<std::recursive_mutex> held{lock};

  explicit Call(const char* of, bool in_context = true) : name(of) {
    if (auto suffix = name.find("_v"); suffix != std::string::npos) name.resize(suffix);
    calls.push_back(name);
    if (!initialized && name != "cuInit")
      code = NOT_INITIALIZED;
    else if (in_context && (current.empty() || !current.back()))
      code = INVALID_CONTEXT;
    else if (in_context && lost)
      code = lost;
    else if (auto found = faults.find(name); found != faults.end() && !found->second.after--) {
      code = found->second.code;
      faults.erase(found);
    }
    if (STICKY.count(code)) lost = code;
  }

  void note(const char* format, ...) __attribute__((format(printf, 2, 3))) {
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    calls.back() += std::string(" ") + text;
  }
};

// Whether this thread captures: what may wait for the device or changes memory breaks that
bool breaks_a_capture() {
  bool found = false;
  for (Stream* stream : streams)
    if (stream->captured && stream->by == std::this_thread::get_id())
      found = stream->broken = true;
  return found;
}

// ---- memory

size_t page() { return sysconf(_SC_PAGESIZE); }

size_t in_use() {
  size_t total = 0;
  for (auto& [address, block] : memory) total += block.size;
  return total;
}

// Whether bytes lie in what is allocated
template <typename Blocks, typename Size>
bool lies_in(const Blocks& blocks, uintptr_t address, size_t size, Size size_of) {
  auto found = blocks.upper_bound(address);
  if (found == blocks.begin()) return false;
  --found;
  return address + size <= found->first + size_of(found->second);
}

bool on_device(uintptr_t address, size_t size) {
  return lies_in(memory, address, size, [](const Block& block) { return block.size; });
}

bool on_host(uintptr_t address, size_t size) {
  return lies_in(pinned, address, size, [](size_t held) { return held; });
}

// Lets the host use device memory while the device works
struct Working {
  static int depth;
  static void protect(int how) {
    for (auto& [address, block] : memory) mprotect(block.pages + page(), block.length, how);
  }
  Working() {
    if (!depth++) protect(PROT_READ | PROT_WRITE);
  }
  ~Working() {
    if (!--depth) protect(PROT_NONE);
  }
};
int Working::depth = 0;

// ---- work

int fault_of_work() {
  auto found = faults.find("work");
  if (found == faults.end() || found->second.after--) return SUCCESS;
  int code = found->second.code;
  faults.erase(found);
  return code;
}

// Does what is on a stream, up to an event where one is given
int finish(Stream* stream, Event* until = nullptr) {
  Working working;
  while (!lost && !stream->work.empty() && !(until && until->reached)) {
    Work work = std::move(stream->work.front());
    stream->work.pop_front();
    int code = fault_of_work();
    if (!code) code = work();
    if (code) lost = code;  // what fails on a device is sticky
  }
  return lost;
}

int finish_all() {
  for (Stream* stream : streams)
    if (int code = finish(stream)) return code;
  return lost;
}

int put(const Call& call, Stream* stream, Work work) {
  if (call.code) return call.code;
  if (!streams.count(stream)) return INVALID_HANDLE;
  if (!stream->captured) {
    stream->work.push_back(std::move(work));
    return SUCCESS;
  }
  if (stream->broken) return CAPTURE_INVALIDATED;
  stream->captured->work.push_back(std::move(work));
  return SUCCESS;
}

// A copy whose ends are checked now, as a driver does, and again when it is done
int put_copy(const Call& call, uintptr_t target, uintptr_t source, size_t size, bool to_device,
             bool from_device, Stream* stream) {
  if (call.code) return call.code;
  auto there = [=] {
    return (to_device ? on_device : on_host)(target, size) &&
           (from_device ? on_device : on_host)(source, size);
  };
  if (!there()) return INVALID_VALUE;
  return put(call, stream, [=] {
    if (!there()) return static_cast<int>(ILLEGAL_ADDRESS);
    memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), size);
    return static_cast<int>(SUCCESS);
  });
}

// ---- kernels

thread_local sigjmp_buf out_of_kernel;

void leave_kernel(int signal) { siglongjmp(out_of_kernel, signal); }

// Runs a kernel; an access that a device refuses is its error
int run_kernel(const Function& function, const std::vector<char>& structure, const unsigned* grid,
               const unsigned* block) {
  struct sigaction leaving = {}, segv, bus, ill;
  leaving.sa_handler = leave_kernel;
  leaving.sa_flags = SA_NODEFER;
  sigaction(SIGSEGV, &leaving, &segv);
  sigaction(SIGBUS, &leaving, &bus);
  sigaction(SIGILL, &leaving, &ill);
  int signal = sigsetjmp(out_of_kernel, 1), code;
  if (!signal)
    code = function.run(structure.data(), grid, block, order);
  else
    code = signal == SIGILL ? MISALIGNED_ADDRESS : ILLEGAL_ADDRESS;
  sigaction(SIGSEGV, &segv, nullptr);
  sigaction(SIGBUS, &bus, nullptr);
  sigaction(SIGILL, &ill, nullptr);
  return code;
}

double now_ms() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

}  // namespace

#define CALL(...)          \
  Call call(__VA_ARGS__);  \
  if (call.code) return call.code

extern "C" {

// ---- device and context

int cuInit(unsigned flags) {
  Call call(__func__, false);
  if (call.code) return call.code;
  if (flags) return INVALID_VALUE;
  if (!devices) return NO_DEVICE;
  initialized = true;
  return SUCCESS;
}

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return SUCCESS;
}

int cuDeviceGetCount(int* count) {
  CALL(__func__, false);
  *count = devices;
  return SUCCESS;
}

int cuDeviceGet(int* device, int ordinal) {
  CALL(__func__, false);
  if (ordinal < 0 || ordinal >= devices) return INVALID_DEVICE;
  *device = ordinal;
  return SUCCESS;
}

int cuDeviceGetName(char* name, int length, int device) {
  CALL(__func__, false);
  if (device) return INVALID_DEVICE;
  snprintf(name, length, "stand-in in host memory");
  return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  CALL(__func__, false);
  *bytes = limit;
  return device ? INVALID_DEVICE : SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  CALL(__func__, false);
  if (device) return INVALID_DEVICE;
  static const std::map<int, int> values = {{CU_MAJOR, 11}, {CU_MINOR, 0}, {CU_MAX_PITCH, MAX_PITCH}};
  auto found = values.find(attribute);
  if (found == values.end()) return INVALID_VALUE;
  *value = found->second;
  return SUCCESS;
}

int cuDeviceComputeCapability(int* major, int* minor, int device) {
  CALL(__func__, false);
  *major = 11, *minor = 0;
  return device ? INVALID_DEVICE : SUCCESS;
}

int cuDevicePrimaryCtxRetain(void** made, int device) {
  CALL(__func__, false);
  if (device) return INVALID_DEVICE;
  ++retained;
  *made = &context;
  return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  CALL(__func__, false);
  if (device) return INVALID_DEVICE;
  if (!retained) return INVALID_CONTEXT;
  --retained;
  return SUCCESS;
}

int cuCtxSetCurrent(void* made) {
  CALL(__func__, false);
  if (made && (made != &context || !retained)) return INVALID_CONTEXT;
  if (!current.empty()) current.pop_back();
  if (made) current.push_back(made);
  return SUCCESS;
}

int cuCtxGetCurrent(void** made) {
  CALL(__func__, false);
  *made = current.empty() ? nullptr : current.back();
  return SUCCESS;
}

int cuCtxPushCurrent_v2(void* made) {
  CALL(__func__, false);
  if (made != &context || !retained) return INVALID_CONTEXT;
  current.push_back(made);
  return SUCCESS;
}

int cuCtxPopCurrent_v2(void** popped) {
  CALL(__func__, false);
  if (current.empty()) return INVALID_CONTEXT;
  if (popped) *popped = current.back();
  current.pop_back();
  return SUCCESS;
}

int cuCtxGetDevice(int* device) {
  CALL(__func__);
  *device = 0;
  return SUCCESS;
}

int cuCtxSynchronize() {
  CALL(__func__);
  return breaks_a_capture() ? CAPTURE_UNSUPPORTED : finish_all();
}

int cuGetErrorString(int code, const char** text) {
  auto found = TEXTS.find(code);
  *text = found == TEXTS.end() ? nullptr : found->second.what;
  return *text ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorName(int code, const char** text) {
  auto found = TEXTS.find(code);
  *text = found == TEXTS.end() ? nullptr : found->second.name;
  return *text ? SUCCESS : INVALID_VALUE;
}

// The newest form of a function that stands here
int cuGetProcAddress_v2(const char* symbol, void** function, int, uint64_t, int* status) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  *function = nullptr;
  if (faults.count(std::string("no ") + symbol)) return NOT_FOUND;
  for (const char* suffix : {"_v4", "_v3", "_v2", ""})
    if (!*function) *function = dlsym(self, (std::string(symbol) + suffix).c_str());
  if (status) *status = *function ? 0 : 1;
  return *function ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress(const char* symbol, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}

// ---- memory

int cuMemAlloc_v2(uintptr_t* address, size_t size) {
  CALL(__func__);
  call.note("%zu", size);
  if (breaks_a_capture()) return CAPTURE_UNSUPPORTED;
  if (!size) return INVALID_VALUE;
  if (in_use() + size > limit) return OUT_OF_MEMORY;
  size_t length = (size + page() - 1) / page() * page(), whole = length + 2 * page();
  void* pages = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return OUT_OF_MEMORY;
  Block block = {size, static_cast<char*>(pages), length};
  mprotect(block.pages + page(), length, PROT_READ | PROT_WRITE);
  memset(block.pages + page(), POISON, length);
  mprotect(block.pages + page(), length, PROT_NONE);
  *address = reinterpret_cast<uintptr_t>(block.pages) + page() + (length - size) / ALIGNMENT * ALIGNMENT;
  memory[*address] = block;
  return SUCCESS;
}

int cuMemFree_v2(uintptr_t address) {
  CALL(__func__);
  call.note("%#zx", static_cast<size_t>(address));
  if (breaks_a_capture()) return CAPTURE_UNSUPPORTED;
  auto found = memory.find(address);
  if (found == memory.end()) return INVALID_VALUE;
  for (Stream* stream : streams)
    if (!stream->work.empty()) complaints.push_back("memory is freed that a stream may still use");
  if (int code = finish_all()) return code;
  munmap(found->second.pages, found->second.length + 2 * page());
  memory.erase(found);
  return SUCCESS;
}

int cuMemGetInfo_v2(size_t* available, size_t* total) {
  CALL(__func__);
  *available = limit - in_use(), *total = limit;
  return SUCCESS;
}

int cuMemHostAlloc(void** address, size_t size, unsigned flags) {
  CALL(__func__);
  call.note("%zu %u", size, flags);
  if (breaks_a_capture()) return CAPTURE_UNSUPPORTED;
  if (!size) return INVALID_VALUE;
  if (posix_memalign(address, page(), size)) return OUT_OF_MEMORY;
  memset(*address, POISON, size);
  pinned[reinterpret_cast<uintptr_t>(*address)] = size;
  return SUCCESS;
}

int cuMemFreeHost(void* address) {
  CALL(__func__);
  if (breaks_a_capture()) return CAPTURE_UNSUPPORTED;
  auto found = pinned.find(reinterpret_cast<uintptr_t>(address));
  if (found == pinned.end()) return INVALID_VALUE;
  for (Stream* stream : streams)
    if (!stream->work.empty()) complaints.push_back("page-locked memory is freed that a stream may still use");
  if (int code = finish_all()) return code;
  pinned.erase(found);
  free(address);
  return SUCCESS;
}

int cuMemsetD8Async(uintptr_t address, unsigned char value, size_t count, Stream* stream) {
  CALL(__func__);
  call.note("%u %zu", value, count);
  if (!on_device(address, count)) return INVALID_VALUE;
  return put(call, stream, [=] {
    if (!on_device(address, count)) return static_cast<int>(ILLEGAL_ADDRESS);
    memset(reinterpret_cast<void*>(address), value, count);
    return static_cast<int>(SUCCESS);
  });
}

int cuMemcpyHtoDAsync_v2(uintptr_t target, const void* source, size_t size, Stream* stream) {
  CALL(__func__);
  call.note("%zu", size);
  return put_copy(call, target, reinterpret_cast<uintptr_t>(source), size, true, false, stream);
}

int cuMemcpyDtoHAsync_v2(void* target, uintptr_t source, size_t size, Stream* stream) {
  CALL(__func__);
  call.note("%zu", size);
  return put_copy(call, reinterpret_cast<uintptr_t>(target), source, size, false, true, stream);
}

int cuMemcpyDtoDAsync_v2(uintptr_t target, uintptr_t source, size_t size, Stream* stream) {
  CALL(__func__);
  call.note("%zu", size);
  if (target < source + size && source < target + size)
    complaints.push_back("a copy on the device overlaps");
  return put_copy(call, target, source, size, true, true, stream);
}

struct Side {
  size_t x, y;
  int kind;
  void* host;
  uintptr_t device;
  void* array;
  size_t pitch;
};

struct Copy2d {
  Side source, target;
  size_t width, height;
};

int cuMemcpy2DAsync_v2(const Copy2d* what, Stream* stream) {
  CALL(__func__);
  Copy2d copy = *what;
  call.note("%zu x %zu, pitches %zu and %zu", copy.height, copy.width, copy.source.pitch,
            copy.target.pitch);
  for (const Side& side : {copy.source, copy.target}) {
    if (side.kind != DEVICE_MEMORY || side.x || side.y) return NOT_SUPPORTED;
    if (side.pitch < copy.width || side.pitch > MAX_PITCH) return INVALID_VALUE;
    if (copy.height && copy.width &&
        !on_device(side.device, (copy.height - 1) * side.pitch + copy.width))
      return INVALID_VALUE;
  }
  return put(call, stream, [copy] {
    for (size_t i = 0; i < copy.height; ++i) {
      uintptr_t target = copy.target.device + i * copy.target.pitch;
      uintptr_t source = copy.source.device + i * copy.source.pitch;
      if (!on_device(target, copy.width) || !on_device(source, copy.width))
        return static_cast<int>(ILLEGAL_ADDRESS);
      memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), copy.width);
    }
    return static_cast<int>(SUCCESS);
  });
}

// ---- streams and events

int cuStreamCreate(Stream** made, unsigned flags) {
  CALL(__func__);
  call.note("%u", flags);
  *made = new Stream;
  streams.insert(*made);
  return SUCCESS;
}

int cuStreamDestroy_v2(Stream* stream) {
  CALL(__func__);
  if (!streams.count(stream)) return INVALID_HANDLE;
  if (int code = finish(stream)) return code;
  for (Event* event : events)
    if (event->stream == stream) event->stream = nullptr;
  streams.erase(stream);
  delete stream;
  return SUCCESS;
}

int cuStreamSynchronize(Stream* stream) {
  CALL(__func__);
  if (!streams.count(stream)) return INVALID_HANDLE;
  return breaks_a_capture() ? CAPTURE_UNSUPPORTED : finish(stream);
}

int cuEventCreate(Event** made, unsigned flags) {
  CALL(__func__);
  call.note("%u", flags);
  *made = new Event;
  events.insert(*made);
  return SUCCESS;
}

int cuEventDestroy_v2(Event* event) {
  CALL(__func__);
  if (!events.count(event)) return INVALID_HANDLE;
  if (event->stream)
    if (int code = finish(event->stream, event)) return code;
  events.erase(event);
  delete event;
  return SUCCESS;
}

int cuEventRecord(Event* event, Stream* stream) {
  CALL(__func__);
  if (!events.count(event) || !streams.count(stream)) return INVALID_HANDLE;
  event->stream = stream;
  event->reached = false;
  return put(call, stream, [event] {
    event->reached = true;
    event->ms = now_ms();
    return static_cast<int>(SUCCESS);
  });
}

int cuEventSynchronize(Event* event) {
  CALL(__func__);
  if (!events.count(event)) return INVALID_HANDLE;
  if (breaks_a_capture()) return CAPTURE_UNSUPPORTED;
  return event->stream ? finish(event->stream, event) : static_cast<int>(SUCCESS);
}

int cuEventElapsedTime(float* ms, Event* begin, Event* end) {
  CALL(__func__);
  for (Event* event : {begin, end}) {
    if (!events.count(event) || !event->stream) return INVALID_HANDLE;
    if (!event->reached) return NOT_READY;
  }
  *ms = static_cast<float>(end->ms - begin->ms);
  return SUCCESS;
}

int cuEventElapsedTime_v2(float* ms, Event* begin, Event* end) {
  return cuEventElapsedTime(ms, begin, end);
}

// ---- graphs

int cuStreamBeginCapture_v2(Stream* stream, int mode) {
  CALL(__func__);
  call.note("%d", mode);
  if (!streams.count(stream)) return INVALID_HANDLE;
  if (stream->captured) return INVALID_VALUE;
  stream->captured = std::make_unique<Graph>();
  stream->broken = false;
  stream->by = std::this_thread::get_id();
  return SUCCESS;
}

int cuStreamEndCapture(Stream* stream, Graph** graph) {
  Call call(__func__);
  *graph = nullptr;
  if (!streams.count(stream)) return INVALID_HANDLE;
  if (call.code) stream->captured.reset();
  if (call.code) return call.code;
  if (!stream->captured) return INVALID_VALUE;
  if (stream->by != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
  std::unique_ptr<Graph> captured = std::move(stream->captured);
  if (stream->broken) return CAPTURE_INVALIDATED;
  *graph = captured.release();
  graphs.insert(*graph);
  return SUCCESS;
}

int cuGraphInstantiateWithFlags(Graph** made, Graph* graph, unsigned long long flags) {
  CALL(__func__);
  call.note("%llu, %zu nodes", flags, graphs.count(graph) ? graph->work.size() : 0);
  if (!graphs.count(graph)) return INVALID_HANDLE;
  *made = new Graph(*graph);
  executables.insert(*made);
  return SUCCESS;
}

int cuGraphDestroy(Graph* graph) {
  CALL(__func__);
  if (!graphs.erase(graph)) return INVALID_HANDLE;
  delete graph;
  return SUCCESS;
}

int cuGraphLaunch(Graph* graph, Stream* stream) {
  CALL(__func__);
  if (!executables.count(graph) || !streams.count(stream)) return INVALID_HANDLE;
  std::vector<Work> work = graph->work;
  return put(call, stream, [work] {
    for (const Work& step : work)
      if (int code = step()) return code;
    return static_cast<int>(SUCCESS);
  });
}

int cuGraphExecDestroy(Graph* graph) {
  CALL(__func__);
  if (!executables.erase(graph)) return INVALID_HANDLE;
  delete graph;
  return SUCCESS;
}

// ---- modules and kernels

// An image is a library for the host, that of the project's kernels
int cuModuleLoadData(Module** made, const void* image) {
  CALL(__func__);
  if (breaks_a_capture()) return CAPTURE_UNSUPPORTED;
  const char* path = static_cast<const char*>(image);
  if (path[0] != '/') return INVALID_IMAGE;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return INVALID_IMAGE;
  *made = new Module{library};
  modules.insert(*made);
  return SUCCESS;
}

// With logs, which stay empty (3 and 5 are their addresses)
int cuModuleLoadDataEx(Module** made, const void* image, unsigned count, int* options,
                       void** values) {
  for (unsigned i = 0; i < count; ++i)
    if (options[i] == 3 || options[i] == 5) *static_cast<char*>(values[i]) = 0;
  return cuModuleLoadData(made, image);
}

int cuModuleUnload(Module* module) {
  CALL(__func__);
  if (!modules.erase(module)) return INVALID_HANDLE;
  delete module;  // its library stays: what is on a stream may still use it
  return SUCCESS;
}

int cuModuleGetFunction(Function** made, Module* module, const char* name) {
  CALL(__func__);
  call.note("%s", name);
  if (!modules.count(module)) return INVALID_HANDLE;
  auto run = reinterpret_cast<Runner>(dlsym(module->library, (std::string("run_") + name).c_str()));
  auto bytes = static_cast<const size_t*>(dlsym(module->library, (std::string("bytes_") + name).c_str()));
  if (!run || !bytes) return NOT_FOUND;
  *made = new Function{run, *bytes};
  functions.insert(*made);
  return SUCCESS;
}

// Old, and asked before each launch by pycuda: cuLaunchKernel has the block's shape again
int cuFuncSetBlockShape(Function* function, int, int, int) {
  CALL(__func__);
  return functions.count(function) ? SUCCESS : INVALID_HANDLE;
}

int cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                   Stream* stream, void** parameters, void** extra) {
  CALL(__func__);
  call.note("%u,%u,%u of %u,%u,%u", grid_x, grid_y, grid_z, block_x, block_y, block_z);
  if (!functions.count(function)) return INVALID_HANDLE;
  if (!grid_x || !grid_y || !grid_z || grid_x > 2147483647u || grid_y > 65535 || grid_z > 65535)
    return INVALID_VALUE;
  if (!block_x || !block_y || !block_z || block_x * block_y * block_z > 1024) return INVALID_VALUE;
  if (shared || !parameters == !extra || function->bytes > PARAMETER_BYTES) return INVALID_VALUE;
  const char* from = parameters ? static_cast<const char*>(parameters[0]) : nullptr;
  size_t size = function->bytes;
  // 1: the address of all parameters, 2: that of their size, 0: the end
  for (int i = 0; extra && extra[i]; i += 2) {
    if (extra[i] == reinterpret_cast<void*>(1)) from = static_cast<const char*>(extra[i + 1]);
    if (extra[i] == reinterpret_cast<void*>(2)) size = *static_cast<const size_t*>(extra[i + 1]);
  }
  if (!from || size != function->bytes) return INVALID_VALUE;
  std::vector<char> structure(from, from + size);
  last_structure = structure;
  Function what = *function;
  return put(call, stream, [=] {
    unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    return run_kernel(what, structure, grid, block);
  });
}

// A function of the host as work of a stream
int cuLaunchHostFunc(Stream* stream, void (*function)(void*), void* data) {
  CALL(__func__);
  return put(call, stream, [=] {
    function(data);
    return static_cast<int>(SUCCESS);
  });
}

// ---- for tests

// Let the call of this name fail that comes after so many; "work" is what a stream does, and a
// function whose name stands behind "no " is not to be found
void stand_in_fail(const char* name, int after, int code) {
  std::lock_guard<std::recursive_mutex> held(lock);
  faults[name] = {after, code};
}

void stand_in_set(int count, size_t bytes, unsigned seed) {
  std::lock_guard<std::recursive_mutex> held(lock);
  devices = count, limit = bytes, order = seed;
}

// A context that is lost works again: a process has no such way
void stand_in_revive() {
  std::lock_guard<std::recursive_mutex> held(lock);
  lost = SUCCESS;
  faults.clear();
}

static const char* joined(std::vector<std::string>& lines) {
  static std::string text;
  std::lock_guard<std::recursive_mutex> held(lock);
  text.clear();
  for (auto& line : lines) text += line + "\n";
  lines.clear();
  return text.c_str();
}

const char* stand_in_calls() { return joined(calls); }

const char* stand_in_complaints() { return joined(complaints); }

size_t stand_in_structure(char* bytes) {
  std::lock_guard<std::recursive_mutex> held(lock);
  if (bytes) memcpy(bytes, last_structure.data(), last_structure.size());
  return last_structure.size();
}

// What is held: bytes of memory, blocks of page-locked memory, streams, events, graphs, modules
void stand_in_held(size_t* counts) {
  std::lock_guard<std::recursive_mutex> held(lock);
  size_t found[] = {in_use(), pinned.size(), streams.size(), events.size(),
                    graphs.size() + executables.size(), modules.size()};
  memcpy(counts, found, sizeof found);
}

}  // extern "C"
