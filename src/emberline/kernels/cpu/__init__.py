"""Native CPU kernels: C++ sources, their build, and the ctypes binding."""
