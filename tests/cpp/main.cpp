#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "ggml-cpu.h"

int main(int argc, char ** argv) {
    ggml_cpu_init(); // tables of halves, which the host program fills when there is one
    doctest::Context context(argc, argv);
    return context.run();
}
