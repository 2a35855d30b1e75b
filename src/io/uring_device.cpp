#include "io/uring_device.h"

#ifdef SLUICE_HAVE_URING

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

#include "base/clock.h"
#include "base/log.h"

namespace sluice {

namespace {

// What helps against this errno of setting up or probing a ring.
const char* remedy(int error) {
  switch (error) {
    case EPERM:
    case EACCES: return "allow io_uring in the sandbox or seccomp profile, or set kernel.io_uring_disabled to 0";
    case ENOSYS:
    case EINVAL: return "it takes Linux 5.6 or later, built with CONFIG_IO_URING";
    case ENOMEM: return "raise the limit on locked memory (ulimit -l) or use a smaller depth";
    case EMFILE:
    case ENFILE: return "raise the limit on open files (ulimit -n)";
    default: return "see the kernel's log";
  }
}

Error refused(int error) {
  return make_error(ErrorCode::kUnsupported, "the kernel refuses io_uring ({}); {}",
                    std::generic_category().message(error), remedy(error));
}

}  // namespace

Result<std::unique_ptr<Device>> UringDevice::open(unsigned depth, bool register_files) {
  std::unique_ptr<UringDevice> device(new UringDevice(depth));
  const int code = io_uring_queue_init(depth, &device->ring_, 0);
  if (code < 0) return refused(-code);
  device->ring_open_ = true;
  if (Status status = device->probe(); !status) return status.error();
  if (register_files) device->make_file_table();
  return std::unique_ptr<Device>(std::move(device));
}

// The kernel takes no table larger than the limit on open files.
void UringDevice::make_file_table() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const unsigned places = static_cast<unsigned>(std::min<rlim_t>(kFilesMax, limit.rlim_cur));
  const int code = io_uring_register_files_sparse(&ring_, places);
  if (code < 0) {
    log_line_once(LogLevel::kInfo,
                  fmt::format("the kernel registers no files for io_uring ({}): reads name descriptors",
                              std::generic_category().message(-code)));
    return;
  }
  file_places_ = places;
  files_.reserve(places);
}

// The file's place in the ring's table, -1 when it has none.
int UringDevice::file_place(const File& file) {
  // From the back: neighbours in time are mostly the same file, and new ones stand last.
  for (size_t place = files_.size(); place > 0; --place) {
    if (files_[place - 1] == file.serial()) return static_cast<int>(place - 1);
  }
  if (files_.size() == file_places_) return -1;
  const int fd = file.fd();
  if (io_uring_register_files_update(&ring_, static_cast<unsigned>(files_.size()), &fd, 1) != 1) {
    file_places_ = files_.size();
    return -1;
  }
  files_.push_back(file.serial());
  return static_cast<int>(files_.size() - 1);
}

void UringDevice::register_memory(std::span<std::byte> memory) {
  SLUICE_ASSERT(registered_memory_.empty(), "memory is registered a second time");
  std::vector<iovec> buffers;
  for (uint64_t begin = 0; begin < memory.size(); begin += kBufferBytesMax) {
    buffers.push_back({memory.data() + begin, std::min<uint64_t>(kBufferBytesMax, memory.size() - begin)});
  }
  if (buffers.empty()) return;
  const int code = io_uring_register_buffers(&ring_, buffers.data(), static_cast<unsigned>(buffers.size()));
  if (code == 0) {
    registered_memory_ = memory;
    return;
  }
  rlimit limit = {};
  const bool limited = getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  log_line_once(LogLevel::kInfo,
                fmt::format("reads go into memory that is not registered with io_uring ({}): it takes {} of locked "
                            "memory, the limit (ulimit -l) is {}",
                            std::generic_category().message(-code), format_bytes(memory.size()),
                            limited ? format_bytes(limit.rlim_cur) : "none"));
}

// The registered buffer that holds all of the destination, -1 when there is none.
int UringDevice::buffer_place(const std::byte* destination, uint64_t bytes) const {
  if (destination < registered_memory_.data()) return -1;
  const auto begin = static_cast<uint64_t>(destination - registered_memory_.data());
  if (begin + bytes > registered_memory_.size() || begin / kBufferBytesMax != (begin + bytes - 1) / kBufferBytesMax) {
    return -1;
  }
  return static_cast<int>(begin / kBufferBytesMax);
}

// Reads from no file. A kernel that knows the operation answers EBADF; one that does not answers EINVAL.
Status UringDevice::probe() {
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  SLUICE_ASSERT(entry != nullptr, "a new ring of {} entries has none", depth_);
  char byte = 0;
  io_uring_prep_read(entry, -1, &byte, 1, 0);
  io_uring_sqe_set_data(entry, nullptr);
  int code = 0;
  do {
    code = io_uring_submit_and_wait(&ring_, 1);
  } while (code == -EINTR);
  if (code < 0) return refused(-code);
  io_uring_cqe* completion = nullptr;
  do {
    code = io_uring_wait_cqe(&ring_, &completion);
  } while (code == -EINTR);
  if (code < 0) return refused(-code);
  const int answer = completion->res;
  io_uring_cqe_seen(&ring_, completion);
  if (answer != -EBADF) return refused(answer < 0 ? -answer : EINVAL);
  return Status();
}

UringDevice::~UringDevice() {
  if (!ring_open_) return;
  // Nothing new is handed over; what the kernel has may still write to its destination.
  while (!abandoned_ && queue_.in_flight_count() > prepared_.size()) {
    if (broken_error_ != 0) {
      std::vector<ReadCompletion> completions;
      wait(completions);
      continue;
    }
    io_uring_cqe* completion = nullptr;
    const int code = io_uring_wait_cqe(&ring_, &completion);
    if (code == -EINTR || code == -EAGAIN) continue;
    if (code < 0) {
      give_up(-code);
      continue;
    }
    auto* read = static_cast<Read*>(io_uring_cqe_get_data(completion));
    io_uring_cqe_seen(&ring_, completion);
    read->progress.fail(ECANCELED);
    queue_.finish(read, read->progress.outcome(read->request.file->path(), read->request.offset));
  }
  io_uring_queue_exit(&ring_);
}

void UringDevice::submit(const ReadRequest& request) {
  queue_.push(request);
}

bool UringDevice::cancel(uint64_t tag) {
  return queue_.cancel(tag);
}

void UringDevice::raise(uint64_t tag) {
  queue_.raise(tag);
}

void UringDevice::poll(std::vector<ReadCompletion>& completions) {
  if (broken_error_ == 0) {
    // What has come back makes room for what is queued, and pieces that continue go out with it.
    reap(completions);
    start_queued();
    if (!prepared_.empty()) enter(0);
    reap(completions);
  }
  if (broken_error_ != 0) fail_pending(completions);
}

void UringDevice::wait(std::vector<ReadCompletion>& completions) {
  const size_t count_before = completions.size();
  if (broken_error_ == 0) reap(completions);
  while (completions.size() == count_before && pending() > 0) {
    if (broken_error_ != 0) {
      fail_pending(completions);
      if (completions.size() == count_before) std::this_thread::sleep_for(std::chrono::microseconds(200));
      continue;
    }
    // One call hands over what is queued and waits: a single read costs no second one.
    start_queued();
    enter(1);
    reap(completions);
  }
  // Places that the completions left are filled before the caller turns to computing.
  if (broken_error_ == 0) {
    start_queued();
    if (!prepared_.empty()) enter(0);
  }
}

void UringDevice::start_queued() {
  while (queue_.in_flight_count() < depth_) {
    Read* read = queue_.start_next();
    if (read == nullptr) return;
    prepare(read);
  }
}

void UringDevice::prepare(Read* read) {
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  SLUICE_ASSERT(entry != nullptr, "no free entry with {} of {} reads in flight", queue_.in_flight_count(), depth_);
  const ReadProgress::Piece piece = read->progress.next_piece();
  std::byte* destination = read->request.destination + piece.start;
  const uint64_t offset = read->request.offset + piece.start;
  const int place = file_place(*read->request.file);
  const int fd = place >= 0 ? place : read->request.file->fd();
  const int buffer = buffer_place(destination, piece.bytes);
  if (buffer >= 0) {
    io_uring_prep_read_fixed(entry, fd, destination, static_cast<unsigned>(piece.bytes), offset, buffer);
  } else {
    io_uring_prep_read(entry, fd, destination, static_cast<unsigned>(piece.bytes), offset);
  }
  if (place >= 0) io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data(entry, read);
  prepared_.push_back(read);
}

// Hands the prepared entries over and waits for `wait_count` completions; a signal may cut the wait short.
void UringDevice::enter(unsigned wait_count) {
  const int code = io_uring_submit_and_wait(&ring_, wait_count);
  const size_t left = io_uring_sq_ready(&ring_);
  prepared_.erase(prepared_.begin(), prepared_.end() - static_cast<std::ptrdiff_t>(left));
  if (code >= 0 || code == -EINTR) {
    refused_since_ns_ = 0;
    return;
  }
  const bool may_pass = code == -EAGAIN || code == -EBUSY || code == -ENOMEM;
  if (refused_since_ns_ == 0) refused_since_ns_ = now_ns();
  if (!may_pass || now_ns() - refused_since_ns_ > kRefusedNsMax) {
    give_up(-code);
  } else if (wait_count > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void UringDevice::reap(std::vector<ReadCompletion>& completions) {
  io_uring_cqe* completion = nullptr;
  while (io_uring_peek_cqe(&ring_, &completion) == 0) {
    auto* read = static_cast<Read*>(io_uring_cqe_get_data(completion));
    // The kernel may cancel what a thread had handed over when that thread ends; the read itself is still wanted.
    const int result = completion->res == -ECANCELED ? -EINTR : completion->res;
    io_uring_cqe_seen(&ring_, completion);
    read->progress.take(result);
    if (!read->progress.finished() && broken_error_ != 0) read->progress.fail(broken_error_);
    if (!read->progress.finished()) {
      prepare(read);
      continue;
    }
    const ReadRequest& request = read->request;
    completions.push_back(queue_.finish(read, read->progress.outcome(request.file->path(), request.offset)));
  }
}

void UringDevice::give_up(int system_error) {
  broken_error_ = system_error;
  broken_since_ns_ = now_ns();
  log_error("the kernel no longer takes io_uring calls ({}): reads fail from here on",
            std::generic_category().message(system_error));
}

// Of a broken ring: fails all that the kernel does not have, and delivers what it gives back.
void UringDevice::fail_pending(std::vector<ReadCompletion>& completions) {
  const auto fail = [&](Read* read) {
    read->progress.fail(broken_error_);
    completions.push_back(
        queue_.finish(read, read->progress.outcome(read->request.file->path(), read->request.offset)));
  };
  if (!abandoned_) reap(completions);
  for (Read* read : prepared_) fail(read);
  prepared_.clear();
  if (!abandoned_ && queue_.in_flight_count() > 0 && now_ns() - broken_since_ns_ > kAbandonNsMax) {
    abandoned_ = true;
    while (Read* read = queue_.find_in_flight()) fail(read);
  }
  while (queue_.queued_count() > 0) fail(queue_.start_next());
}

}  // namespace sluice

#endif  // SLUICE_HAVE_URING
