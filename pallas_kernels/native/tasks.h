// SPDX-License-Identifier: Apache-2.0
// Work shared out among XLA's own threads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tsjax {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A thread takes tasks until none is left. What it needs it shares with the others: one that comes
// late finds nothing left and touches nothing else, as the caller's arrays may be gone by then.
struct Job {
  const int64_t tasks;
  std::atomic<int64_t> next{0}, done{0};

  explicit Job(int64_t tasks) : tasks(tasks) {}
  virtual ~Job() = default;
  virtual void work(int64_t task) = 0;
  void take() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      work(i);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Helpers wait a little for the next job before they go back to XLA: a step has dozens of jobs of
// some ten microseconds, and to wake a thread takes as long as one of them.
class Helpers {
 public:
  static Helpers& all() {
    static Helpers* helpers = new Helpers;  // is never destroyed: a thread may outlive main
    return *helpers;
  }

  // Makes `job` known to those that wait; returns how many they are.
  int64_t offer(const std::shared_ptr<Job>& job) {
    std::lock_guard<std::mutex> guard(lock_);
    newest_ = job;
    turn_.fetch_add(1, std::memory_order_release);
    return waiting_;
  }

  // Nobody else begins with it, and it need not be kept.
  void withdraw(const std::shared_ptr<Job>& job) {
    std::lock_guard<std::mutex> guard(lock_);
    if (newest_ == job) newest_.reset();
  }

  void help(std::shared_ptr<Job> job) {
    for (int64_t seen = 0; job; job = wait(&seen)) job->take();
  }

 private:
  // The next job that is offered within PATIENCE; none after that.
  std::shared_ptr<Job> wait(int64_t* seen) {
    std::unique_lock<std::mutex> guard(lock_);
    *seen = turn_.load(std::memory_order_relaxed);
    waiting_++;
    guard.unlock();
    const auto end = std::chrono::steady_clock::now() + PATIENCE;
    bool called = false;
    while (!called && std::chrono::steady_clock::now() < end) {
      for (int i = 0; i < 20 && !called; i++) {
        pause();
        called = turn_.load(std::memory_order_acquire) != *seen;
      }
    }
    guard.lock();
    waiting_--;
    return turn_.load(std::memory_order_relaxed) != *seen ? newest_ : nullptr;
  }

  static constexpr std::chrono::microseconds PATIENCE{100};
  std::mutex lock_;
  std::shared_ptr<Job> newest_;
  std::atomic<int64_t> turn_{0};
  int64_t waiting_ = 0;
};

// work(i) for i from 0 to `tasks`, on the caller's thread and, if they are worth sharing, on those
// of the pool, XLA's or a test's; returns when all are done.
template <class Pool, class Work>
void run_tasks(Pool& pool, int64_t tasks, bool worth_sharing, Work work) {
  int64_t threads = worth_sharing ? pool.num_threads() : 1;
  if (threads > tasks) threads = tasks;
  if (threads <= 1) {
    for (int64_t i = 0; i < tasks; i++) work(i);
    return;
  }
  struct Own : Job {
    Work own;
    Own(Work work, int64_t tasks) : Job(tasks), own(std::move(work)) {}
    void work(int64_t task) override { own(task); }
  };
  std::shared_ptr<Job> job = std::make_shared<Own>(std::move(work), tasks);
  for (int64_t i = 1 + Helpers::all().offer(job); i < threads; i++) {
    pool.Schedule([job] { Helpers::all().help(job); });
  }
  job->take();
  for (int spins = 0; job->done.load(std::memory_order_acquire) < tasks; spins++) {
    if (spins < 1000) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  Helpers::all().withdraw(job);
}

// Bytes that begin with a line of the cache: a vector that lies in two lines takes two reads.
class Memory {
 public:
  ~Memory() { operator delete(bytes_, LINE); }
  void* have(int64_t size) {
    if (size > size_) {
      operator delete(bytes_, LINE);
      bytes_ = nullptr, size_ = 0;
      bytes_ = operator new(size, LINE);
      size_ = size;
    }
    return bytes_;
  }

 private:
  static constexpr std::align_val_t LINE{64};
  void* bytes_ = nullptr;
  int64_t size_ = 0;
};

// A thread's own memory of at least `size` numbers, kept for its next task.
template <int WHICH, class Number = float>
Number* scratch(int64_t size) {
  static thread_local Memory memory;
  return static_cast<Number*>(memory.have(size * sizeof(Number)));
}

}  // namespace tsjax
