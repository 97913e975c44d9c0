#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "kernels/stream.h"

int main(int n_arguments, char** arguments) {
  samestep::kernels::set_owns_after_read(true);  // stores more, so that there is more to go wrong, on any processor
  return doctest::Context(n_arguments, arguments).run();
}
