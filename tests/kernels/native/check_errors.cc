// What becomes of an exception in a task, as where there is no memory: the call's error, once all other tasks are done.
#include <stdexcept>

#include "checks.h"
#include "parallel.h"
#include "xla_call.h"

namespace ffi = xla::ffi;

namespace {

struct Threads {
  Pool& pool;
  void Schedule(std::function<void()> task) { pool.schedule(std::move(task)); }
  int64_t num_threads() const { return pool.num_threads(); }
};

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  ++failures;
}

}  // namespace

int check_errors() {
  for (int64_t num_threads : {1, 3}) {
    Pool pool(num_threads);
    Threads threads{pool};
    std::atomic<int> done{0};
    const auto fails = [&](int64_t i) {
      if (i % 10 == 3) throw std::bad_alloc();
      ++done;
    };
    const ffi::Error error =
        raggedmoe::call_safely([&] { raggedmoe::parallel_for(threads, 40, std::function<void(int64_t)>(fails)); });
    expect(error.errc() == ffi::ErrorCode::kResourceExhausted, "a task without memory is no error of the call");
    expect(done == 36, "a task was left out because another one failed");

    raggedmoe::Steps steps;  // tasks that wait for one that fails
    std::atomic<int> waited{0};
    const int64_t first = steps.begin();
    steps.add([] { throw std::runtime_error("wrong"); });
    steps.add([] {});
    steps.begin(first);
    for (int i = 0; i < 5; ++i) steps.add([&] { ++waited; });
    const ffi::Error of_steps = raggedmoe::call_safely([&] { steps.run(threads); });
    expect(of_steps.message() == "wrong", "an exception's message is lost");
    expect(waited == 5, "tasks that waited for one that failed were not run");
  }
  return 2;
}
