#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace megatrain {
namespace {

// Updates come in bursts, and waking a thread takes tens of microseconds.
constexpr std::chrono::microseconds kSpin{30};

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

template <typename Condition>
bool spin_until(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (condition()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// Lives on the caller's stack. The caller removes it from the list and waits until `inside` is 0 before it returns.
struct Job {
    int (*work)(void*, size_t) noexcept = nullptr;
    void* context = nullptr;
    size_t parts = 0;
    int helpers = 0;  // threads that may still join; guarded by the pool's mutex
    Job* next = nullptr;
    std::atomic<size_t> taken{0};
    std::atomic<int> inside{0};  // threads at work; incremented under the mutex
    std::atomic<int> error{0};

    // Parts are taken one at a time, so that a slow core delays only its last one.
    void help() noexcept {
        for (size_t part; (part = taken.fetch_add(1, std::memory_order_relaxed)) < parts;) {
            const int failure = work(context, part);
            if (failure == 0) continue;
            int none = 0;
            error.compare_exchange_strong(none, failure);
            taken.store(parts, std::memory_order_relaxed);
        }
    }

    bool open() const { return helpers > 0 && taken.load(std::memory_order_relaxed) < parts; }
};

class Pool {
   public:
    int run(Job& job) noexcept {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            // Failing to start a thread is no error: the caller does its share.
            while (workers_ < job.helpers && start_worker()) {
            }
            *last_ = &job;
            last_ = &job.next;
            submitted_.fetch_add(1, std::memory_order_relaxed);
            const int wanted = std::min(job.helpers, sleeping_);
            for (int i = 0; i < wanted; ++i) wake_.notify_one();
        }
        job.help();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            remove(job);
        }
        const auto alone = [&job] { return job.inside.load(std::memory_order_acquire) == 0; };
        if (!spin_until(alone)) {
            std::unique_lock<std::mutex> lock(mutex_);
            left_.wait(lock, alone);
        }
        return job.error.load();
    }

   private:
    bool start_worker() {
        // Workers must not receive the program's signals.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_t thread;
        const bool made = pthread_create(&thread, nullptr, &Pool::enter, this) == 0;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (!made) return false;
        char name[16];
        std::snprintf(name, sizeof name, "megatrain-%d", workers_++);
        pthread_setname_np(thread, name);
        pthread_detach(thread);
        return true;
    }

    static void* enter(void* pool) {
        static_cast<Pool*>(pool)->serve();
        return nullptr;
    }

    [[noreturn]] void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            while (Job* job = find()) {
                --job->helpers;
                job->inside.fetch_add(1, std::memory_order_relaxed);
                lock.unlock();
                job->help();
                lock.lock();
                // The last use of the job: at 0 its caller returns and its stack is gone. Under the mutex, so that the
                // caller cannot read 1 and then miss the notification.
                if (job->inside.fetch_sub(1, std::memory_order_release) == 1) left_.notify_all();
            }
            const unsigned seen = submitted_.load(std::memory_order_relaxed);
            lock.unlock();
            const bool more = spin_until([&] { return submitted_.load(std::memory_order_relaxed) != seen; });
            lock.lock();
            if (more || submitted_.load(std::memory_order_relaxed) != seen) continue;
            ++sleeping_;
            wake_.wait(lock);
            --sleeping_;
        }
    }

    Job* find() const {
        for (Job* job = first_; job != nullptr; job = job->next) {
            if (job->open()) return job;
        }
        return nullptr;
    }

    void remove(Job& job) {
        Job** link = &first_;
        while (*link != &job) link = &(*link)->next;
        *link = job.next;
        if (last_ == &job.next) last_ = link;
    }

    std::mutex mutex_;
    std::condition_variable wake_, left_;
    std::atomic<unsigned> submitted_{0};  // jobs so far
    Job* first_ = nullptr;
    Job** last_ = &first_;
    int workers_ = 0, sleeping_ = 0;
};

// Never destroyed: its threads may sleep in it while the process exits.
std::atomic<Pool*> current{nullptr};

// Only the forking thread exists in a child, so the child starts without a pool and abandons the old one.
void forget_pool() { current.store(nullptr); }

Pool* pool() noexcept {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
    static_cast<void>(registered);
    Pool* found = current.load(std::memory_order_acquire);
    if (found != nullptr) return found;
    Pool* made = new (std::nothrow) Pool;
    if (made == nullptr) return nullptr;
    if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return made;
    delete made;  // another thread was first; this pool has no threads yet
    return found;
}

}  // namespace

int run_parts(size_t parts, int threads, int (*work)(void*, size_t) noexcept, void* context) noexcept {
    Job job;
    job.work = work;
    job.context = context;
    job.parts = parts;
    job.helpers = static_cast<int>(std::min<size_t>(std::max(threads, 1), std::max<size_t>(parts, 1))) - 1;
    // One thread needs no pool; without a pool, the calling thread does all the work.
    Pool* shared = job.helpers > 0 ? pool() : nullptr;
    if (shared != nullptr) return shared->run(job);
    job.help();
    return job.error.load();
}

}  // namespace megatrain
