#include "io/pread_device.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <iterator>
#include <system_error>

#include "base/log.h"

namespace sluice {

Result<std::unique_ptr<Device>> PreadDevice::open(unsigned depth, unsigned threads) {
  std::unique_ptr<PreadDevice> device(new PreadDevice);
  const unsigned wanted = std::min(depth, threads != 0 ? threads : kThreadsDefaultMax);
  device->threads_.reserve(wanted);

  // Threads inherit the mask: the program's signals are for the program's own threads.
  sigset_t all_signals;
  sigset_t callers_signals;
  sigfillset(&all_signals);
  pthread_sigmask(SIG_SETMASK, &all_signals, &callers_signals);
  std::error_code failure;
  try {
    while (device->threads_.size() < wanted) device->threads_.emplace_back([raw = device.get()] { raw->work(); });
  } catch (const std::system_error& error) {
    failure = error.code();
  }
  pthread_sigmask(SIG_SETMASK, &callers_signals, nullptr);

  if (device->threads_.empty()) {
    return make_system_error(ErrorCode::kNoMemory, failure.value(), "cannot start a thread to read with");
  }
  if (failure) {
    log_warning_once("reading with {} threads where {} were wanted: {}", device->threads_.size(), wanted,
                     failure.message());
  }
  return std::unique_ptr<Device>(std::move(device));
}

PreadDevice::~PreadDevice() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_available_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void PreadDevice::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_available_.wait(lock, [this] { return stopping_ || queue_.queued_count() > 0; });
    if (stopping_) return;
    Read* read = queue_.start_next();
    lock.unlock();
    const ReadRequest& request = read->request;
    const ReadOutcome outcome = read_blocking({.fd = request.file->fd(),
                                               .path = &request.file->path(),
                                               .offset = request.offset,
                                               .bytes = request.bytes,
                                               .bytes_needed = request.bytes_needed,
                                               .align_bytes = request.file->align_bytes(),
                                               .destination = request.destination});
    lock.lock();
    finished_.push_back(queue_.finish(read, outcome));
    read_finished_.notify_one();
  }
}

void PreadDevice::submit(const ReadRequest& request) {
  {
    std::lock_guard lock(mutex_);
    queue_.push(request);
  }
  work_available_.notify_one();
}

bool PreadDevice::cancel(uint64_t tag) {
  std::lock_guard lock(mutex_);
  return queue_.cancel(tag);
}

void PreadDevice::raise(uint64_t tag) {
  std::lock_guard lock(mutex_);
  queue_.raise(tag);
}

void PreadDevice::poll(std::vector<ReadCompletion>& completions) {
  std::lock_guard lock(mutex_);
  deliver_locked(completions);
}

void PreadDevice::wait(std::vector<ReadCompletion>& completions) {
  std::unique_lock lock(mutex_);
  read_finished_.wait(lock, [this] { return !finished_.empty() || pending_locked() == 0; });
  deliver_locked(completions);
}

void PreadDevice::deliver_locked(std::vector<ReadCompletion>& completions) {
  completions.insert(completions.end(), std::make_move_iterator(finished_.begin()),
                     std::make_move_iterator(finished_.end()));
  finished_.clear();
}

size_t PreadDevice::pending() const {
  std::lock_guard lock(mutex_);
  return pending_locked();
}

DeviceStats PreadDevice::stats() const {
  std::lock_guard lock(mutex_);
  return queue_.stats();
}

}  // namespace sluice
