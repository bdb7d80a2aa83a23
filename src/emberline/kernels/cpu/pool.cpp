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
        std::lock_guard lock(turn_);
        stop_ = true;
        begin();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stop_ = false;
        uint32_t now = epoch_.load();
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, now] { work(now); });
    }

    int size() const { return int(workers_.size()) + 1; }

    // Grows with every piece of work that is done: a process that computes can be told from one that hangs.
    long progress() const { return done_.load(std::memory_order_relaxed); }

    void run(long items, Body body) {
        done_.fetch_add(1, std::memory_order_relaxed);
        if (workers_.empty() || items <= 1) return items ? body.call(body.object, 0, items) : void();
        std::lock_guard lock(turn_);
        body_ = body;
        items_ = items;
        next_.store(0, std::memory_order_relaxed);
        open_.store(true, std::memory_order_release);
        begin();
        take();
        // Only workers that came in are waited for: one the system has not scheduled yet must not hold up the rest.
        open_.store(false, std::memory_order_seq_cst);
        for (int spins = 0; inside_.load(std::memory_order_seq_cst); spins++)
            if (spins < 4000) pause();
            else std::this_thread::yield();
    }

private:
    void begin() {
        epoch_.fetch_add(1, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst)) epoch_.notify_all();
    }

    void take() {
        long share = 2 * size(), at = next_.load(std::memory_order_relaxed);
        while (at < items_) {
            long piece = std::max(1L, (items_ - at) / share);
            if (!next_.compare_exchange_weak(at, at + piece, std::memory_order_relaxed)) continue;
            body_.call(body_.object, at, at + piece);
            done_.fetch_add(1, std::memory_order_relaxed);
            at = next_.load(std::memory_order_relaxed);
        }
    }

    void work(uint32_t seen) {
        for (;;) {
            seen = await(seen);
            if (stop_) return;
            inside_.fetch_add(1, std::memory_order_seq_cst);
            if (open_.load(std::memory_order_seq_cst)) take();
            inside_.fetch_sub(1, std::memory_order_release);
        }
    }

    uint32_t await(uint32_t seen) {
        using namespace std::chrono;
        auto until = steady_clock::now() + microseconds(100);
        do {
            for (int i = 0; i < 64; i++, pause())
                if (uint32_t now = epoch_.load(std::memory_order_acquire); now != seen) return now;
        } while (steady_clock::now() < until);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        epoch_.wait(seen, std::memory_order_seq_cst);
        asleep_.fetch_sub(1, std::memory_order_relaxed);
        return epoch_.load(std::memory_order_acquire);
    }

    std::mutex turn_;
    std::vector<std::thread> workers_;
    Body body_{};
    long items_ = 0;
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<long> next_{0};
    alignas(64) std::atomic<bool> open_{false};
    alignas(64) std::atomic<int> inside_{0};
    alignas(64) std::atomic<int> asleep_{0};
    alignas(64) std::atomic<long> done_{0};
};

// Never destroyed: its threads may outlive static destructors at exit.
Pool& pool() {
    static Pool* one = new Pool;
    return *one;
}

struct Free {
    void operator()(float* p) const { std::free(p); }
};

}  // namespace

void set_threads(int threads) { pool().resize(threads); }
int threads() { return pool().size(); }
long progress() { return pool().progress(); }
void run_parallel(long items, Body body) { pool().run(items, body); }

float* scratch(Slot slot, long floats) {
    thread_local std::unique_ptr<float, Free> held[kSlots];
    thread_local long size[kSlots] = {};
    if (size[slot] < floats) {
        long bytes = (floats * 4 + 63) / 64 * 64;
        held[slot].reset(static_cast<float*>(std::aligned_alloc(64, size_t(bytes))));
        size[slot] = floats;
    }
    return held[slot].get();
}

}  // namespace ember
