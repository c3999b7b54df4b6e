// Tasks on the threads that XLA gives a call. The calling thread works too, so that a busy pool delays nothing for ever.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace raggedmoe {

// Runs task(i) for every i < num_tasks on the caller's thread and those of the pool. Tasks are begun in their order, so
// one may wait for what earlier ones do, as each of these is done or has a thread of its own. All of them are run, also if
// one throws; the first exception is thrown on once nobody works any more.
template <class Pool>
void parallel_for(Pool& pool, int64_t num_tasks, std::function<void(int64_t)> task) {
  struct State {
    std::function<void(int64_t)> task;
    int64_t num_tasks;
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;
    std::exception_ptr error;
  };
  if (num_tasks <= 0) return;
  auto state = std::make_shared<State>();
  state->task = std::move(task);
  state->num_tasks = num_tasks;
  // A helper that starts after the last task finds none, and touches nothing but the state, which it keeps alive.
  auto work = [state] {
    for (int64_t i; (i = state->next.fetch_add(1)) < state->num_tasks;) {
      try {
        state->task(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(state->mutex);
        if (!state->error) state->error = std::current_exception();
      }
      if (state->done.fetch_add(1) + 1 == state->num_tasks) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->all_done.notify_all();
      }
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), num_tasks) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done.load() == state->num_tasks; });
  if (state->error) std::rethrow_exception(state->error);
}

// A list of tasks in the order in which they are begun, some of which wait until all of an earlier step are done.
class Steps {
 public:
  using Task = std::function<void()>;

  // Begins a step, which waits for an earlier one, or for none (-1). Returns its number.
  int64_t begin(int64_t waits_for = -1) {
    first_.push_back(tasks_.size());
    waits_for_.push_back(waits_for);
    return first_.size() - 1;
  }
  void add(Task task) { tasks_.push_back({static_cast<int64_t>(first_.size()) - 1, std::move(task)}); }

  template <class Pool>
  void run(Pool& pool) {
    first_.push_back(tasks_.size());
    std::vector<std::atomic<int64_t>> done(waits_for_.size());
    parallel_for(pool, tasks_.size(), [&](int64_t i) {
      const int64_t step = tasks_[i].first, before = waits_for_[step];
      if (before >= 0)
        for (int spins = 0; done[before].load(std::memory_order_acquire) < first_[before + 1] - first_[before]; ++spins)
          if (spins > 1000) std::this_thread::yield();
      const Done after{done[step]};  // also of a task that throws, as others wait for it
      tasks_[i].second();
    });
  }

 private:
  struct Done {
    std::atomic<int64_t>& count;
    ~Done() { count.fetch_add(1, std::memory_order_release); }
  };
  std::vector<std::pair<int64_t, Task>> tasks_;
  std::vector<int64_t> first_, waits_for_;
};

}  // namespace raggedmoe
