// deny CALL=ERROR... -- PROGRAM ARGUMENTS...: runs a program whose system calls of these names are answered with an
// error, as in a container whose seccomp rules forbid them. CALL: io_uring_setup, io_uring_enter, io_uring_register,
// madvise; ERROR: EPERM, ENOSYS, ENOMEM, EINVAL. Exit 77: the kernel takes no filter.
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

namespace {

template <typename Table>
long find(const Table& table, std::string_view name) {
  for (const auto& [known, number] : table) {
    if (name == known) return number;
  }
  return -1;
}

struct Name {
  std::string_view name;
  long number;
};
constexpr Name kCalls[] = {{"io_uring_setup", SYS_io_uring_setup},
                           {"io_uring_enter", SYS_io_uring_enter},
                           {"io_uring_register", SYS_io_uring_register},
                           {"madvise", SYS_madvise}};
constexpr Name kErrors[] = {{"EPERM", EPERM}, {"ENOSYS", ENOSYS}, {"ENOMEM", ENOMEM}, {"EINVAL", EINVAL}};

}  // namespace

int main(int argc, char** argv) {
  std::vector<sock_filter> program = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  int i = 1;
  for (; i < argc && std::strcmp(argv[i], "--") != 0; ++i) {
    const std::string_view word = argv[i];
    const size_t equals = word.find('=');
    const long call = find(kCalls, word.substr(0, equals));
    const long error = equals == word.npos ? -1 : find(kErrors, word.substr(equals + 1));
    if (call < 0 || error < 0) {
      std::fprintf(stderr, "deny: wanted CALL=ERROR, given '%s'\n", argv[i]);
      return 2;
    }
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)));
  }
  if (i + 1 >= argc) {
    std::fprintf(stderr, "usage: deny CALL=ERROR... -- PROGRAM ARGUMENTS...\n");
    return 2;
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter = {.len = static_cast<unsigned short>(program.size()), .filter = program.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    return 77;
  execvp(argv[i + 1], argv + i + 1);
  std::perror("deny");
  return 127;
}
