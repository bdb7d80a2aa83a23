// The answer of the operating system to a request for AMX, as a test wants it. A library that contains this file and is linked with -Bsymbolic
// calls this function instead of libc's.
extern "C" {
long test_amx_answer = -1;  // 0: granted
long syscall(long, ...) { return test_amx_answer; }
}
