// The kernels of collectives.cu for a CPU, launched by name with an array of pointers to arguments, as by the CUDA driver.
static int mistake;
#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include "collectives.cu"

using Arguments = void**;
template <class... A, size_t... I>
static void call(void (*kernel)(A...), Arguments arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
}
template <class... A> static std::function<void(Arguments)> wrap(void (*kernel)(A...)) {
  return [kernel](Arguments arguments) { call(kernel, arguments, std::index_sequence_for<A...>()); };
}

static const std::map<std::string, std::function<void(Arguments)>> kernels = {
    {"reduce_one_shot<bf16, 4>", wrap(reduce_one_shot<bf16, 4>)},
    {"reduce_one_shot<float, 4>", wrap(reduce_one_shot<float, 4>)},
    {"reduce_two_shot<bf16, 4>", wrap(reduce_two_shot<bf16, 4>)},
    {"reduce_add_norm<bf16, 1, 4>", wrap(reduce_add_norm<bf16, 1, 4>)},
    {"gather_rows<uint4>", wrap(gather_rows<uint4>)},
    {"gather_rows<u32>", wrap(gather_rows<u32>)},
    {"gather_rows<u8>", wrap(gather_rows<u8>)},
    {"exchange_parts<uint4>", wrap(exchange_parts<uint4>)},
    {"exchange_parts<u8>", wrap(exchange_parts<u8>)},
    {"broadcast", wrap(broadcast)},
    {"send_message", wrap(send_message)},
    {"receive_message", wrap(receive_message)},
};

extern "C" int launch_kernel(const char* name, int blocks, int threads, Arguments arguments) {
  const auto found = kernels.find(name);
  if (found == kernels.end()) return 1;
  launch(blocks, threads, [&] { found->second(arguments); });
  return 0;
}
extern "C" int count_group_bytes() { return sizeof(Group); }
