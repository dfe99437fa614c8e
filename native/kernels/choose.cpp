// Chooses the kernels that this processor runs. A file kernels_NAME.cpp that the compiler could not
// build is left out by STREAMSPEC_WITHOUT_NAME.
#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels/kernels.h"

#if defined(__x86_64__) || defined(_M_X64)
#define STREAMSPEC_X86 1
#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) || defined(_M_ARM64)
#define STREAMSPEC_ARM 1
#if defined(_WIN32)
#include <windows.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif
#endif

namespace streamspec {
namespace {

#if STREAMSPEC_X86
struct Registers {
    uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers out{};
#if defined(_MSC_VER) && !defined(__clang__)
    int four[4];
    __cpuid(four, 0);
    if (leaf > static_cast<uint32_t>(four[0])) return out;
    __cpuidex(four, static_cast<int>(leaf), static_cast<int>(subleaf));
    std::memcpy(&out, four, sizeof out);
#else
    __get_cpuid_count(leaf, subleaf, &out.eax, &out.ebx, &out.ecx, &out.edx);
#endif
    return out;
}

uint32_t processor_family() {
    const uint32_t signature = cpuid(1, 0).eax;
    return (signature >> 8 & 15) + (signature >> 20 & 255);
}

// Registers that the operating system saves for each thread.
uint64_t saved_registers() {
#if defined(_MSC_VER) && !defined(__clang__)
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
#endif
}

bool has_all(uint64_t bits, uint64_t mask) { return (bits & mask) == mask; }

// Asks Linux for the registers of AMX, which a process may not use before.
bool may_use_matrices() {
#ifdef __linux__
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
    return false;
#endif
}

struct Features {
    bool avx2 = false, avxvnni = false, avx512vnni = false, amx = false;

    Features() {
        // Leaf 1, ecx
        constexpr uint32_t kFma = 1u << 12, kXsave = 1u << 27, kAvx = 1u << 28, kF16c = 1u << 29;
        // Leaf 7.0, ebx; then ecx; leaf 7.1, eax
        constexpr uint32_t kAvx2 = 1u << 5, kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30;
        constexpr uint32_t kVl = 1u << 31;
        constexpr uint32_t kVnni = 1u << 11;
        constexpr uint32_t kAvxVnni = 1u << 4;
        constexpr uint32_t kAmx = 1u << 24 | 1u << 25;   // leaf 7.0, edx: registers, int8
        constexpr uint64_t kWide = 0x6, kWidest = 0xe6;  // registers of 256 bits; of 512, and masks
        constexpr uint64_t kMatrices = 3u << 17;
        if (!has_all(cpuid(1, 0).ecx, kFma | kXsave | kAvx | kF16c)) return;
        const uint64_t saved = saved_registers();
        const Registers leaf7 = cpuid(7, 0);
        avx2 = has_all(saved, kWide) && has_all(leaf7.ebx, kAvx2);
        avxvnni = avx2 && leaf7.eax >= 1 && has_all(cpuid(7, 1).eax, kAvxVnni);
        avx512vnni = avx2 && has_all(saved, kWidest) && has_all(leaf7.ebx, kF | kDq | kBw | kVl) &&
                     has_all(leaf7.ecx, kVnni);
        amx = avx512vnni && has_all(saved, kMatrices) && has_all(leaf7.edx, kAmx) &&
              may_use_matrices();
    }
};
#elif STREAMSPEC_ARM
bool dot_products() {
#if defined(_WIN32)
    return IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
#elif defined(__APPLE__)
    int there = 0;
    size_t size = sizeof there;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &there, &size, nullptr, 0) == 0 && there;
#elif defined(__linux__)
    return (getauxval(AT_HWCAP) & 1u << 20) != 0;  // HWCAP_ASIMDDP
#else
    return false;
#endif
}
#endif

}  // namespace

#if STREAMSPEC_X86
const bool kByAmd = cpuid(0, 0).ebx == 0x68747541;                        // "Auth" of AuthenticAMD
const int kWorkInL1 = kByAmd && processor_family() < 0x1a ? 4 : INT_MAX;  // 0x1a: Zen 5
#endif

// clang-format off
#if STREAMSPEC_X86
namespace amx { void linear(const Linear&, const Rows&, size_t from, size_t to, float* y); }
namespace avx512vnni { extern const Kernels kKernels; }
namespace avxvnni { extern const Kernels kKernels; }
namespace avx2 { extern const Kernels kKernels; }
#elif STREAMSPEC_ARM
namespace dotprod { extern const Kernels kKernels; }
namespace neon { extern const Kernels kKernels; }
#endif
namespace portable { extern const Kernels kKernels; }
// clang-format on

Choices runnable_kernels() {
    Choices out{};
    [[maybe_unused]] const auto add = [&](bool runs, const Kernels& kernels) {
        if (runs) out.of[out.count++] = &kernels;
    };
#if STREAMSPEC_X86
    [[maybe_unused]] static const Features features;
#ifndef STREAMSPEC_WITHOUT_AVX512VNNI
#if defined(__linux__) && !defined(STREAMSPEC_WITHOUT_AMX)
    static const Kernels with_matrices = [] {
        Kernels all = avx512vnni::kKernels;
        all.name = "amx";
        all.linear = amx::linear;
        return all;
    }();
    add(features.amx, with_matrices);
#endif
    add(features.avx512vnni, avx512vnni::kKernels);
#endif
#ifndef STREAMSPEC_WITHOUT_AVXVNNI
    add(features.avxvnni, avxvnni::kKernels);
#endif
#ifndef STREAMSPEC_WITHOUT_AVX2
    add(features.avx2, avx2::kKernels);
#endif
#elif STREAMSPEC_ARM
#ifndef STREAMSPEC_WITHOUT_DOTPROD
    add(dot_products(), dotprod::kKernels);
#endif
#ifndef STREAMSPEC_WITHOUT_NEON
    add(true, neon::kKernels);
#endif
#endif
    add(true, portable::kKernels);
    return out;
}

const char* runnable_names() {
    static const std::string names = [] {
        const Choices choices = runnable_kernels();
        std::string out;
        for (size_t i = 0; i < choices.count; i++)
            out += (i ? ", " : "") + std::string(choices.of[i]->name);
        return out;
    }();
    return names.c_str();
}

const Kernels* chosen_kernels() {
    static const Kernels* const chosen = []() -> const Kernels* {
        const Choices choices = runnable_kernels();
        const char* name = std::getenv("STREAMSPEC_KERNELS");
        if (name == nullptr || *name == '\0') return choices.of[0];
        for (size_t i = 0; i < choices.count; i++)
            if (std::strcmp(choices.of[i]->name, name) == 0) return choices.of[i];
        return nullptr;
    }();
    return chosen;
}

const Kernels& kernels() { return *chosen_kernels(); }

}  // namespace streamspec
