// Any bytes as a model file: a catalog or a refusal in one line, and nothing that ggml's reader would have to refuse
// after ours let it pass. What opens must stream as a GGUF too.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/assert.h"
#include "store/catalog.h"
#include "store/gguf_header.h"
#include "store/model_stream.h"

namespace {

void fail_on_log(ggml_log_level, const char* text, void*) {
  SLUICE_ASSERT(false, "ggml refuses what the catalog's checks let pass: {}", text);
}

void read_stream(const sluice::Catalog& catalog) {
  const auto stream = sluice::open_model_stream(catalog);
  SLUICE_ASSERT(stream.ok(), "{}", stream.error().message());
  {
    const sluice::GgufContextPtr context(gguf_init_from_file_ptr(*stream, {/*no_alloc=*/true, /*ctx=*/nullptr}));
    SLUICE_ASSERT(context != nullptr, "the stream is no GGUF");
    SLUICE_ASSERT(gguf_get_n_tensors(context.get()) == static_cast<int64_t>(catalog.tensors.size()),
                  "{} tensors became {}", catalog.tensors.size(), gguf_get_n_tensors(context.get()));
  }
  std::rewind(*stream);
  std::vector<char> buffer(uint64_t{1} << 16);
  while (std::fread(buffer.data(), 1, buffer.size(), *stream) == buffer.size()) {
  }
  SLUICE_ASSERT(std::feof(*stream) && !std::ferror(*stream), "the stream does not read to its end");
  std::fclose(*stream);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ggml_log_set(fail_on_log, nullptr);
  const int fd = memfd_create("model", MFD_CLOEXEC);
  SLUICE_ASSERT(fd >= 0, "no memory file");
  SLUICE_ASSERT(write(fd, data, size) == static_cast<ssize_t>(size), "the memory file takes no {} bytes", size);

  const auto catalog = sluice::Catalog::open("/proc/self/fd/" + std::to_string(fd), sluice::DirectMode::kOff);
  if (catalog) {
    for (const sluice::CatalogTensor& tensor : catalog->tensors) {
      SLUICE_ASSERT(tensor.range.offset <= size && tensor.range.bytes <= size - tensor.range.offset,
                    "{} reaches behind the file", tensor.name);
    }
    // The padding of a huge alignment would be all that such a stream reads.
    const uint64_t stream_bytes_max = uint64_t{1} << 24;
    const auto header = sluice::read_gguf_header(*catalog->files.front());
    SLUICE_ASSERT(header.ok(), "{}", header.error().message());
    if (gguf_get_alignment(header->context.get()) * catalog->tensors.size() < stream_bytes_max) read_stream(*catalog);
  } else {
    const std::string text = catalog.error().message();
    SLUICE_ASSERT(!text.empty() && text.find('\n') == std::string::npos, "not one line: {}", text);
  }
  close(fd);
  return 0;
}
