// io_shim.so: a drive and a file system with odd habits, for programs started with LD_PRELOAD. Stands between the
// program and pread, open and statx of files whose path ends with .gguf; everything else passes. It does not see
// io_uring.
//
// SHIM_HABITS  a list with commas:
//   short        every read returns a part of what was asked: from one byte, for direct reads from one block of 512
//   eintr        every second read is interrupted
//   int_max      a read of more than INT_MAX bytes is refused
//   eio=N        the N-th direct read of at least 4 KiB (so of an expert) fails with EIO, once
//   eio_for=N    the N-th such read fails, and all later ones of the same offset
//   no_direct    opening for direct reads is refused
//   bad_direct   every direct read is refused
//   pages        a direct read whose address or offset is no multiple of 4096 is refused
//   no_tail      a direct read that reaches past the end of the file is refused
//   no_align     statx does not tell the alignment of direct reads
// SHIM_LOG     a file to which "reads N" is written at the end
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

namespace {

template <typename Function>
Function next_function(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

struct Habits {
  bool short_reads = false, eintr = false, int_max = false, no_direct = false, bad_direct = false, pages = false;
  bool no_tail = false, no_align = false;
  uint64_t eio = 0, eio_for = 0;

  Habits() {
    const char* value = std::getenv("SHIM_HABITS");
    std::string_view list = value == nullptr ? "" : value;
    while (!list.empty()) {
      const std::string word(list.substr(0, list.find(',')));
      list.remove_prefix(std::min(list.size(), word.size() + 1));
      const size_t equals = word.find('=');
      const std::string name = word.substr(0, equals);
      const uint64_t number = equals == std::string::npos ? 1 : std::strtoull(word.c_str() + equals + 1, nullptr, 10);
      if (name == "short")
        short_reads = true;
      else if (name == "eintr")
        eintr = true;
      else if (name == "int_max")
        int_max = true;
      else if (name == "eio")
        eio = number;
      else if (name == "eio_for")
        eio_for = number;
      else if (name == "no_direct")
        no_direct = true;
      else if (name == "bad_direct")
        bad_direct = true;
      else if (name == "pages")
        pages = true;
      else if (name == "no_tail")
        no_tail = true;
      else if (name == "no_align")
        no_align = true;
      else {
        std::fprintf(stderr, "io_shim: no habit is called '%s'\n", name.c_str());
        _exit(99);
      }
    }
  }
};

const Habits& habits() {
  static const Habits instance;
  return instance;
}

std::atomic<uint64_t> reads = 0;
std::atomic<uint64_t> expert_reads = 0;
std::atomic<int64_t> broken_offset = -1;

bool is_model_path(std::string_view path) {
  return path.ends_with(".gguf");
}

bool is_model(int fd) {
  char link[64];
  char path[PATH_MAX];
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof(path));
  return length > 0 && is_model_path({path, static_cast<size_t>(length)});
}

ssize_t real_pread(int fd, void* data, size_t bytes, off64_t offset) {
  static const auto function = next_function<ssize_t (*)(int, void*, size_t, off64_t)>("pread64");
  return function(fd, data, bytes, offset);
}

ssize_t refuse(int error) {
  errno = error;
  return -1;
}

ssize_t odd_pread(int fd, void* data, size_t bytes, off64_t offset) {
  if (!is_model(fd)) return real_pread(fd, data, bytes, offset);
  const Habits& habit = habits();
  const uint64_t number = ++reads;
  const bool direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
  if (habit.eintr && number % 2 == 0) return refuse(EINTR);
  if (habit.int_max && bytes > INT_MAX) return refuse(EINVAL);
  if (direct && habit.bad_direct) return refuse(EINVAL);
  if (direct && habit.pages && (reinterpret_cast<uintptr_t>(data) % 4096 != 0 || offset % 4096 != 0))
    return refuse(EINVAL);
  if (direct && habit.no_tail) {
    struct stat info = {};
    if (fstat(fd, &info) == 0 && offset + static_cast<off64_t>(bytes) > info.st_size) return refuse(EINVAL);
  }
  if (direct && bytes >= 4096) {
    const uint64_t number_of_expert = ++expert_reads;
    if (number_of_expert == habit.eio) return refuse(EIO);
    if (number_of_expert == habit.eio_for) broken_offset = offset;
    if (offset == broken_offset) return refuse(EIO);
  }
  if (habit.short_reads) {
    const size_t unit = direct ? 512 : 1;
    const uint64_t mixed = number * 0x9E3779B97F4A7C15u;
    const size_t units = bytes / unit;
    // Mostly small parts, so that every read is continued, but not so small that the test takes for ever.
    if (units > 1) bytes = (1 + (mixed >> 20) % (number % 16 == 0 ? 1 : units)) * unit;
  }
  return real_pread(fd, data, bytes, offset);
}

bool refuses_open(const char* path, int flags) {
  return (flags & O_DIRECT) != 0 && habits().no_direct && is_model_path(path);
}

mode_t mode_of(int flags, va_list arguments) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? static_cast<mode_t>(va_arg(arguments, unsigned)) : 0;
}

struct Log {
  ~Log() {
    const char* path = std::getenv("SHIM_LOG");
    std::FILE* file = path == nullptr ? nullptr : std::fopen(path, "w");
    if (file == nullptr) return;
    std::fprintf(file, "reads %llu\n", static_cast<unsigned long long>(reads.load()));
    std::fclose(file);
  }
} log_at_end;

}  // namespace

#define SHIM_EXPORT extern "C" __attribute__((visibility("default")))

SHIM_EXPORT ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  return odd_pread(fd, data, bytes, offset);
}
SHIM_EXPORT ssize_t pread64(int fd, void* data, size_t bytes, off64_t offset) {
  return odd_pread(fd, data, bytes, offset);
}

SHIM_EXPORT int open(const char* path, int flags, ...) {
  static const auto function = next_function<int (*)(const char*, int, ...)>("open");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  if (refuses_open(path, flags)) return static_cast<int>(refuse(EINVAL));
  return function(path, flags, mode);
}

SHIM_EXPORT int open64(const char* path, int flags, ...) {
  static const auto function = next_function<int (*)(const char*, int, ...)>("open64");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  if (refuses_open(path, flags)) return static_cast<int>(refuse(EINVAL));
  return function(path, flags, mode);
}

SHIM_EXPORT int statx(int folder, const char* path, int flags, unsigned mask, struct statx* info) {
  static const auto function = next_function<int (*)(int, const char*, int, unsigned, struct statx*)>("statx");
  const int code = function(folder, path, flags, mask, info);
#ifdef STATX_DIOALIGN
  if (code == 0 && habits().no_align) info->stx_mask &= ~static_cast<unsigned>(STATX_DIOALIGN);
#endif
  return code;
}
