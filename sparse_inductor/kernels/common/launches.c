// Repeats the launches of a recorded call (replay.py) with new addresses.
//
// A step launches a kernel, writes zeros or calls a matrix product of torch. The values that differ from call to call are
// in one array of 64-bit words: addresses, then the handle of the stream.

#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Functions of the CUDA driver, in the order of `launches.py`.
typedef struct {
    __typeof__(&cuLaunchKernelEx) launch;
    __typeof__(&cuMemsetD8Async) set;
    __typeof__(&cuFuncGetParamInfo) parameter;
    __typeof__(&cuTensorMapReplaceAddress) replace_address;
    __typeof__(&cuCtxGetCurrent) context;
    __typeof__(&cuCtxSetCurrent) set_context;
} Driver;

enum { NUMBER, FLOAT, ADDRESS, TENSOR_MAP };

// A kernel's parameter: the bits of a number, or the address words[base] + value, which is passed directly or in the
// step's next tensor map.
typedef struct {
    int64_t kind;
    int64_t base;
    int64_t value;
} Parameter;

enum { MOST_PARAMETERS = 256, MOST_MAPS = 16, MOST_ATTRIBUTES = 4 };
// Two more parameters of every Triton kernel, pointers to scratch memory, which are null here.
enum { SCRATCH = 2 };

// A matrix, or a bias, of a product: its address words[base] + offset, and its layout.
typedef struct {
    int64_t base, offset;
    int64_t dim, size[2], stride[2];
    int64_t dtype;
} Operand;

// Functions of torch's C interface, which AOTInductor's programs call (aoti_torch/c/shim.h): create a tensor on existing
// memory, release it, and multiply. Tensors are handles. The functions return 0 on success.
typedef struct {
    int (*tensor)(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t, void**);
    int (*release)(void*);
    union {
        int (*mm)(void* out, void* a, void* b);
        int (*mm_dtype)(void* out, void* a, void* b, int32_t dtype);
        int (*addmm)(void* out, void* bias, void* a, void* b, double beta, double alpha);
    };
} Torch;

enum { LAUNCH, ZEROS, MM, MM_DTYPE, ADDMM };
// Result of a failing product, different from all errors of the driver.
enum { FAILED = -1, MOST_OPERANDS = 4 };

typedef struct {
    int kind;
    int base;  // ZEROS: `bytes` zeros at words[base] + offset
    size_t offset, bytes;
    CUfunction function;
    CUlaunchConfig config;
    CUlaunchAttribute attributes[MOST_ATTRIBUTES];
    int count;
    Parameter* parameters;
    CUtensorMap* maps;
    Torch torch;  // products of `count` operands on this device; the first operand is the result
    int device_type, device;
    Operand operands[MOST_OPERANDS];
} Step;

typedef struct {
    Driver driver;
    CUcontext context;
    int stream;  // index of the word with the stream
    int count;
    Step** steps;
} Plan;

static CUresult launch(const Driver* driver, Step* step, const uint64_t* words, CUstream stream) {
    void* given[MOST_PARAMETERS + SCRATCH];
    uint64_t values[MOST_PARAMETERS + SCRATCH];
    CUtensorMap maps[MOST_MAPS];
    int used = 0;
    for (int i = 0; i < step->count + SCRATCH; i++) {
        given[i] = &values[i];
        values[i] = 0;
        if (i >= step->count) continue;
        const Parameter* p = &step->parameters[i];
        values[i] = p->kind < ADDRESS ? (uint64_t)p->value : words[p->base] + p->value;
        if (p->kind == TENSOR_MAP) {
            maps[used] = step->maps[used];
            CUresult failed = driver->replace_address(&maps[used], (void*)values[i]);
            if (failed) return failed;
            given[i] = &maps[used++];
        }
    }
    CUlaunchConfig config = step->config;
    config.hStream = stream;
    config.attrs = step->attributes;
    return driver->launch(&config, step->function, given, NULL);
}

static int multiply(const Step* step, const uint64_t* words) {
    const Torch* torch = &step->torch;
    void* t[MOST_OPERANDS] = {NULL};
    int failed = 0;
    for (int i = 0; i < step->count && !failed; i++) {
        const Operand* o = &step->operands[i];
        failed = torch->tensor((void*)(words[o->base] + o->offset), o->dim, o->size, o->stride, 0, o->dtype,
                               step->device_type, step->device, &t[i]);
    }
    // For in-place addition torch requires the same tensor twice, not two tensors on the same memory.
    void* bias = memcmp(&step->operands[0], &step->operands[1], sizeof(Operand)) ? t[1] : t[0];
    if (!failed)
        failed = step->kind == MM         ? torch->mm(t[0], t[1], t[2])
                 : step->kind == MM_DTYPE ? torch->mm_dtype(t[0], t[1], t[2], step->operands[0].dtype)
                                          : torch->addmm(t[0], bias, t[2], t[3], 1.0, 1.0);
    for (int i = 0; i < step->count; i++)
        if (t[i]) torch->release(t[i]);
    return failed ? FAILED : 0;
}

// Whether these parameters match those that the driver reports for the kernel. Converts floats to the kernel's size.
static int fits(const Driver* driver, Step* step) {
    size_t at, size;
    for (int i = 0; i < step->count + SCRATCH; i++) {
        if (driver->parameter(step->function, i, &at, &size)) return 0;
        if (i >= step->count) {
            if (size != sizeof(CUdeviceptr)) return 0;
            continue;
        }
        Parameter* p = &step->parameters[i];
        int known = p->kind == NUMBER    ? size <= 8
                    : p->kind == FLOAT   ? size == 4 || size == 8
                    : p->kind == ADDRESS ? size == sizeof(CUdeviceptr)
                                         : size == sizeof(CUtensorMap);
        if (!known) return 0;
        if (p->kind == FLOAT && size == 4) {
            double exact;
            memcpy(&exact, &p->value, sizeof exact);
            float rounded = (float)exact;
            p->value = 0;
            memcpy(&p->value, &rounded, sizeof rounded);
        }
    }
    return driver->parameter(step->function, step->count + SCRATCH, &at, &size) != CUDA_SUCCESS;
}

static CUlaunchAttributeValue* attribute(Step* step, CUlaunchAttributeID id) {
    CUlaunchAttribute* made = &step->attributes[step->config.numAttrs++];
    made->id = id;
    return &made->value;
}

// A new step with room for parameters and tensor maps; NULL if out of memory.
static Step* step_of(int kind, int count, int map_count) {
    size_t maps = (sizeof(Step) + 63) / 64 * 64;  // tensor maps are aligned to 64 bytes
    size_t parameters = maps + map_count * sizeof(CUtensorMap);
    size_t bytes = parameters + count * sizeof(Parameter);
    char* memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) return NULL;
    memset(memory, 0, bytes);
    Step* step = (Step*)memory;
    step->kind = kind;
    step->count = count;
    step->maps = (CUtensorMap*)(memory + maps);
    step->parameters = (Parameter*)(memory + parameters);
    return step;
}

// Append the step, or free it; 0 if it was appended.
static int add(Plan* plan, Step* step) {
    Step** steps = step ? realloc(plan->steps, (plan->count + 1) * sizeof *steps) : NULL;
    if (!steps) {
        free(step);
        return 1;
    }
    steps[plan->count++] = step;
    plan->steps = steps;
    return 0;
}

Plan* sparse_launches_new(const Driver* driver, int stream) {
    Plan* plan = calloc(1, sizeof *plan);
    if (plan) {
        plan->driver = *driver;
        plan->stream = stream;
        driver->context(&plan->context);
    }
    return plan;
}

void sparse_launches_free(Plan* plan) {
    for (int i = 0; i < plan->count; i++) free(plan->steps[i]);
    free(plan->steps);
    free(plan);
}

// Append a launch; 0 on success. numbers: grid (3), threads, shared memory, cluster size, cooperative, programmatic
// dependent launch. parameters: `count` of them. maps: the tensor maps among them.
int sparse_launches_add(Plan* plan, CUfunction function, const int64_t* numbers, int count,
                        const void* parameters, const void* maps, int map_count) {
    if (count > MOST_PARAMETERS || map_count > MOST_MAPS) return 1;
    Step* step = step_of(LAUNCH, count, map_count);
    if (!step) return 1;
    step->function = function;
    memcpy(step->parameters, parameters, count * sizeof(Parameter));
    memcpy(step->maps, maps, map_count * sizeof(CUtensorMap));
    int nothing = !numbers[0] || !numbers[1] || !numbers[2];
    if (nothing || !fits(&plan->driver, step)) {
        free(step);
        return !nothing;
    }
    const unsigned cluster = numbers[5];
    CUlaunchConfig* config = &step->config;
    config->gridDimX = numbers[0] * cluster;
    config->gridDimY = numbers[1];
    config->gridDimZ = numbers[2];
    config->blockDimX = numbers[3];
    config->blockDimY = config->blockDimZ = 1;
    config->sharedMemBytes = numbers[4];
    if (numbers[7])
        attribute(step, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)->programmaticStreamSerializationAllowed = 1;
    if (numbers[6]) attribute(step, CU_LAUNCH_ATTRIBUTE_COOPERATIVE)->cooperative = 1;
    if (cluster != 1) {
        CUlaunchAttributeValue* size = attribute(step, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
        size->clusterDim.x = cluster;
        size->clusterDim.y = size->clusterDim.z = 1;
        attribute(step, CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE)->clusterSchedulingPolicyPreference =
            CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
    }
    return add(plan, step);
}

int sparse_launches_zeros(Plan* plan, int base, size_t offset, size_t bytes) {
    Step* step = step_of(ZEROS, 0, 0);
    if (step) {
        step->base = base;
        step->offset = offset;
        step->bytes = bytes;
    }
    return add(plan, step);
}

// Append a product; 0 on success. kind: 0 for MM, 1 for MM_DTYPE, 2 for ADDMM. device: type and index of torch's C functions.
int sparse_launches_product(Plan* plan, const Torch* torch, int kind, const int64_t* device, int count,
                            const void* operands) {
    Step* step = count <= MOST_OPERANDS ? step_of(MM + kind, 0, 0) : NULL;
    if (step) {
        step->torch = *torch;
        step->device_type = device[0];
        step->device = device[1];
        step->count = count;
        memcpy(step->operands, operands, count * sizeof(Operand));
    }
    return add(plan, step);
}

int sparse_launches_count(const Plan* plan) { return plan->count; }

// Make the steps `first` to `last` - 1; returns 0, or the error of the step that failed.
int sparse_launches_run(Plan* plan, int first, int last, const uint64_t* words) {
    const Driver* driver = &plan->driver;
    CUcontext current = NULL;
    int failed = driver->context(&current);
    if (!failed && !current) failed = driver->set_context(plan->context);
    CUstream stream = (CUstream)words[plan->stream];
    for (int i = first; i < last && !failed; i++) {
        Step* step = plan->steps[i];
        failed = step->kind == LAUNCH  ? launch(driver, step, words, stream)
                 : step->kind == ZEROS ? driver->set(words[step->base] + step->offset, 0, step->bytes, stream)
                                       : multiply(step, words);
    }
    return failed;
}
