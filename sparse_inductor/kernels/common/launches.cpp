// The launches of a recorded call (replay.py), made one after the other with new addresses.
//
// A step launches a kernel, writes zeros, records an event in a stream or has a stream wait for one. What differs from call to call
// is in one array of 64-bit words: addresses, then handles of streams and events.

#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

// Functions of the CUDA driver, in the order of `launches.py`.
struct Driver {
    decltype(&cuLaunchKernelEx) launch;
    decltype(&cuMemsetD8Async) set;
    decltype(&cuEventRecord) record;
    decltype(&cuStreamWaitEvent) wait;
    decltype(&cuFuncGetParamInfo) parameter;
    decltype(&cuTensorMapReplaceAddress) replace_address;
    decltype(&cuCtxGetCurrent) context;
    decltype(&cuCtxSetCurrent) set_context;
};

enum Kind : int64_t { NUMBER, FLOAT, ADDRESS, TENSOR_MAP };

// What a kernel's parameter is given: a number's bits, or the address `value` bytes behind the one in word `base`, by
// itself or in the next of the step's tensor maps.
struct Parameter {
    Kind kind;
    int64_t base;
    int64_t value;
};

constexpr int MOST_PARAMETERS = 256, MOST_MAPS = 16, MOST_ATTRIBUTES = 4;
// Behind its parameters a kernel of Triton has two pointers to scratch memory, here null.
constexpr int SCRATCH = 2;

struct Step {
    enum { LAUNCH, ZEROS, RECORD, WAIT } kind;
    int stream, other;  // words: the stream, and the event or the address that zeros are behind
    size_t offset = 0, bytes = 0;
    CUfunction function = nullptr;
    CUlaunchConfig config = {};
    CUlaunchAttribute attributes[MOST_ATTRIBUTES] = {};
    std::vector<Parameter> parameters;
    std::vector<CUtensorMap> maps;

    Step(decltype(kind) kind, int stream, int other) : kind(kind), stream(stream), other(other) {}
};

struct Plan {
    Driver driver;
    CUcontext context;
    std::vector<std::unique_ptr<Step>> steps;
};

CUresult launch(const Driver& driver, Step& step, const uint64_t* words) {
    void* given[MOST_PARAMETERS + SCRATCH];
    uint64_t values[MOST_PARAMETERS + SCRATCH];
    CUtensorMap maps[MOST_MAPS];
    int i = 0, used = 0;
    for (const Parameter& p : step.parameters) {
        uint64_t value = p.kind < ADDRESS ? p.value : words[p.base] + p.value;
        if (p.kind == TENSOR_MAP) {
            maps[used] = step.maps[used];
            given[i++] = &maps[used];
            CUresult failed = driver.replace_address(&maps[used++], reinterpret_cast<void*>(value));
            if (failed) return failed;
        } else {
            values[i] = value;
            given[i] = &values[i];
            i++;
        }
    }
    for (int last = i + SCRATCH; i < last; i++) {
        values[i] = 0;
        given[i] = &values[i];
    }
    CUlaunchConfig config = step.config;
    config.hStream = reinterpret_cast<CUstream>(words[step.stream]);
    config.attrs = step.attributes;
    return driver.launch(&config, step.function, given, nullptr);
}

// Whether the driver knows the kernel with these parameters; floats get the bits of their size.
bool fits(const Driver& driver, Step& step) {
    size_t at, size, n = step.parameters.size();
    if (n > MOST_PARAMETERS || step.maps.size() > MOST_MAPS) return false;
    for (size_t i = 0; i < n + SCRATCH; i++) {
        if (driver.parameter(step.function, i, &at, &size)) return false;
        if (i >= n) {
            if (size != sizeof(CUdeviceptr)) return false;
            continue;
        }
        Parameter& p = step.parameters[i];
        bool known = p.kind == NUMBER    ? size <= 8
                     : p.kind == FLOAT   ? size == 4 || size == 8
                     : p.kind == ADDRESS ? size == sizeof(CUdeviceptr)
                                         : size == sizeof(CUtensorMap);
        if (!known) return false;
        if (p.kind == FLOAT && size == 4) {
            double exact;
            std::memcpy(&exact, &p.value, sizeof exact);
            float rounded = static_cast<float>(exact);
            p.value = 0;
            std::memcpy(&p.value, &rounded, sizeof rounded);
        }
    }
    return driver.parameter(step.function, n + SCRATCH, &at, &size) != CUDA_SUCCESS;
}

}  // namespace

extern "C" {

Plan* sparse_launches_new(const Driver* driver) {
    CUcontext context = nullptr;
    driver->context(&context);
    return new Plan{*driver, context, {}};
}

void sparse_launches_free(Plan* plan) { delete plan; }

// numbers: grid, threads, shared memory, programs of a cluster, whether it is cooperative, whether it starts early.
// parameters: `count` triples of kind, base and value. maps: of those that are tensor maps. 0 where it was added.
int sparse_launches_add(Plan* plan, CUfunction function, int stream, const int64_t* numbers, int count,
                        const int64_t* parameters, const CUtensorMap* maps, int map_count) {
    auto step = std::make_unique<Step>(Step::LAUNCH, stream, 0);
    step->function = function;
    step->maps.resize(map_count);
    if (map_count) std::memcpy(step->maps.data(), maps, map_count * sizeof *maps);
    for (const int64_t* p = parameters; p < parameters + 3 * count; p += 3)
        step->parameters.push_back({static_cast<Kind>(p[0]), p[1], p[2]});
    if (!fits(plan->driver, *step)) return 1;
    const unsigned cluster = numbers[5];
    CUlaunchConfig& config = step->config;
    config.gridDimX = numbers[0] * cluster;
    config.gridDimY = numbers[1];
    config.gridDimZ = numbers[2];
    config.blockDimX = numbers[3];
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = numbers[4];
    auto attribute = [&](CUlaunchAttributeID id) -> CUlaunchAttributeValue& {
        CUlaunchAttribute& made = step->attributes[config.numAttrs++];
        made.id = id;
        return made.value;
    };
    if (numbers[7]) attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION).programmaticStreamSerializationAllowed = 1;
    if (numbers[6]) attribute(CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1;
    if (cluster != 1) {
        auto& size = attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim;
        size.x = cluster;
        size.y = size.z = 1;
        attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE).clusterSchedulingPolicyPreference =
            CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
    }
    if (numbers[0] && numbers[1] && numbers[2]) plan->steps.push_back(std::move(step));
    return 0;
}

void sparse_launches_zeros(Plan* plan, int stream, int base, size_t offset, size_t bytes) {
    auto step = std::make_unique<Step>(Step::ZEROS, stream, base);
    step->offset = offset;
    step->bytes = bytes;
    plan->steps.push_back(std::move(step));
}

void sparse_launches_event(Plan* plan, int wait, int stream, int event) {
    plan->steps.push_back(std::make_unique<Step>(wait ? Step::WAIT : Step::RECORD, stream, event));
}

int sparse_launches_count(const Plan* plan) { return static_cast<int>(plan->steps.size()); }

// Steps from `first` up to `last`; 0, or the error with which one of them failed.
int sparse_launches_run(Plan* plan, int first, int last, const uint64_t* words) {
    const Driver& driver = plan->driver;
    CUcontext current = nullptr;
    CUresult failed = driver.context(&current);
    if (!failed && !current) failed = driver.set_context(plan->context);
    for (int i = first; i < last && !failed; i++) {
        Step& step = *plan->steps[i];
        auto stream = reinterpret_cast<CUstream>(words[step.stream]);
        if (step.kind == Step::LAUNCH) {
            failed = launch(driver, step, words);
        } else if (step.kind == Step::ZEROS) {
            failed = driver.set(words[step.other] + step.offset, 0, step.bytes, stream);
        } else if (step.kind == Step::RECORD) {
            failed = driver.record(reinterpret_cast<CUevent>(words[step.other]), stream);
        } else {
            failed = driver.wait(stream, reinterpret_cast<CUevent>(words[step.other]), 0);
        }
    }
    return failed;
}
}
