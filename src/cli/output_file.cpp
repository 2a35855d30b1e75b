#include "cli/output_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace sluice {

Result<OutputFile> OutputFile::create(const std::string& path) {
  OutputFile out;
  out.path_ = path;
  struct stat info = {};
  const bool direct = stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode);
  if (!direct) out.temporary_path_ = fmt::format("{}.{}.tmp", path, getpid());
  const std::string& opened = direct ? out.path_ : out.temporary_path_;
  out.file_ = std::fopen(opened.c_str(), "wb");
  if (!out.file_) {
    const int error = errno;
    out.temporary_path_.clear();
    return make_system_error(ErrorCode::kBadArgument, error, "cannot write '{}'", path);
  }
  return out;
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_path_(std::exchange(other.temporary_path_, {})),
      file_(std::exchange(other.file_, nullptr)) {}

OutputFile::~OutputFile() {
  if (file_) std::fclose(file_);
  if (!temporary_path_.empty()) unlink(temporary_path_.c_str());
}

Status OutputFile::write(const void* data, size_t bytes) {
  SLUICE_ASSERT(file_, "write to '{}' after commit", path_);
  if (std::fwrite(data, 1, bytes, file_) == bytes) return {};
  return make_system_error(ErrorCode::kBadArgument, errno, "cannot write {} bytes to '{}'", bytes, path_);
}

Status OutputFile::commit() {
  SLUICE_ASSERT(file_, "second commit of '{}'", path_);
  if (std::fclose(std::exchange(file_, nullptr)) != 0) {
    return make_system_error(ErrorCode::kBadArgument, errno, "cannot write '{}'", path_);
  }
  if (temporary_path_.empty()) return {};
  if (std::rename(temporary_path_.c_str(), path_.c_str()) != 0) {
    return make_system_error(ErrorCode::kBadArgument, errno, "cannot rename '{}' to '{}'", temporary_path_, path_);
  }
  temporary_path_.clear();
  return {};
}

Status OutputFile::write_and_commit(std::string_view text) {
  if (Status written = write(text.data(), text.size()); !written) return written;
  return commit();
}

}  // namespace sluice
