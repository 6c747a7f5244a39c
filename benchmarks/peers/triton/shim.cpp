// The symbols of glibc 2.38 and GCC 13 that perf_analyzer needs, for systems that lack them.

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>

static std::ios_base::Init streams;  // what _ZSt21ios_base_library_initv does elsewhere

extern "C" {

void _ZSt21ios_base_library_initv() {}

// The C23 functions differ in binary literals only.
long __isoc23_strtol(const char *text, char **end, int base) { return std::strtol(text, end, base); }
unsigned long __isoc23_strtoul(const char *text, char **end, int base) { return std::strtoul(text, end, base); }
long long __isoc23_strtoll(const char *text, char **end, int base) { return std::strtoll(text, end, base); }
unsigned long long __isoc23_strtoull(const char *text, char **end, int base) { return std::strtoull(text, end, base); }

int __isoc23_sscanf(const char *text, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int found = std::vsscanf(text, format, arguments);
  va_end(arguments);
  return found;
}

// std::string::_M_replace_cold: replaces `old_size` characters at `place` by `source`, which may lie in the same string;
// `tail` characters follow them.
void _ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE15_M_replace_coldEPcmPKcmm(
    void *, char *place, std::size_t old_size, const char *source, std::size_t size, std::size_t tail) {
  const std::string copy(source, size);
  if (tail != 0 && old_size != size) std::memmove(place + size, place + old_size, tail);
  std::memcpy(place, copy.data(), size);
}
}
