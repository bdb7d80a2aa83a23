#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ember {
namespace {

inline void pause() {
#if defined(__aarch64__)
    asm volatile("isb");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Pool {
public:
    void resize(int threads) {
        std::lock_guard lock(run_mutex_);
        stop_ = true;
        wake_workers();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stop_ = false;
        uint32_t now = epoch_.load();
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, now] { run_worker(now); });
    }

    int size() const { return int(workers_.size()) + 1; }

    // Grows with every piece of work, so that a watchdog can distinguish computing from hanging.
    long progress() const { return progress_.load(std::memory_order_relaxed); }

    void run(long items, Body body) {
        progress_.fetch_add(1, std::memory_order_relaxed);
        if (workers_.empty() || items <= 1) return items ? body.call(body.object, 0, items) : void();
        std::lock_guard lock(run_mutex_);
        body_ = body;
        items_ = items;
        next_.store(0, std::memory_order_relaxed);
        open_.store(true, std::memory_order_release);
        wake_workers();
        run_pieces();
        // Wait only for workers that have entered: one that the system has not scheduled yet must not delay the others. seq_cst
        // orders this store before the loads of inside_: a worker either sees the task closed, or is counted here.
        open_.store(false, std::memory_order_seq_cst);
        for (int spins = 0; inside_.load(std::memory_order_seq_cst); spins++)
            if (spins < 4000) pause();
            else std::this_thread::yield();
    }

private:
    void wake_workers() {
        epoch_.fetch_add(1, std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) epoch_.notify_all();
    }

    void run_pieces() {
        long share = 2 * size(), at = next_.load(std::memory_order_relaxed);
        while (at < items_) {
            long piece = std::max(1L, (items_ - at) / share);
            if (!next_.compare_exchange_weak(at, at + piece, std::memory_order_relaxed)) continue;
            body_.call(body_.object, at, at + piece);
            progress_.fetch_add(1, std::memory_order_relaxed);
            at = next_.load(std::memory_order_relaxed);
        }
    }

    void run_worker(uint32_t last_epoch) {
        for (;;) {
            last_epoch = wait_for_epoch(last_epoch);
            if (stop_) return;
            inside_.fetch_add(1, std::memory_order_seq_cst);
            if (open_.load(std::memory_order_seq_cst)) run_pieces();
            inside_.fetch_sub(1, std::memory_order_release);
        }
    }

    uint32_t wait_for_epoch(uint32_t last_epoch) {
        using namespace std::chrono;
        auto until = steady_clock::now() + microseconds(100);
        do {
            for (int i = 0; i < 64; i++, pause())
                if (uint32_t now = epoch_.load(std::memory_order_acquire); now != last_epoch) return now;
        } while (steady_clock::now() < until);
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        epoch_.wait(last_epoch, std::memory_order_seq_cst);
        sleeping_.fetch_sub(1, std::memory_order_relaxed);
        return epoch_.load(std::memory_order_acquire);
    }

    std::mutex run_mutex_;
    std::vector<std::thread> workers_;
    Body body_{};
    long items_ = 0;
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<long> next_{0};
    alignas(64) std::atomic<bool> open_{false};
    alignas(64) std::atomic<int> inside_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    alignas(64) std::atomic<long> progress_{0};
};

// Never destroyed, since its threads may outlive static destructors at exit.
Pool& pool() {
    static Pool* instance = new Pool;
    return *instance;
}

struct FreeDeleter {
    void operator()(float* p) const { std::free(p); }
};

}  // namespace

void set_threads(int threads) { pool().resize(threads); }
int threads() { return pool().size(); }
long progress() { return pool().progress(); }
void run_parallel(long items, Body body) { pool().run(items, body); }

float* scratch(Slot slot, long floats) {
    thread_local std::unique_ptr<float, FreeDeleter> memory[kSlots];
    thread_local long size[kSlots] = {};
    if (size[slot] < floats) {
        long bytes = (floats * 4 + 63) / 64 * 64;
        memory[slot].reset(static_cast<float*>(std::aligned_alloc(64, size_t(bytes))));
        size[slot] = floats;
    }
    return memory[slot].get();
}

}  // namespace ember
