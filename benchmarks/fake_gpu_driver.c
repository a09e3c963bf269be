/* The functions of CUDA's runtime and driver that torch calls before its first launch, with the answers of one H200.
 * benchmarks/fake_gpu.py builds this file and loads it before the real libraries. It allocates no memory and runs no kernel. */
#include <driver_types.h>
#include <string.h>

#define HBM_BYTES 150754820096UL

int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaMemGetInfo(unsigned long *free, unsigned long *total) { *free = *total = HBM_BYTES; return 0; }

int cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "NVIDIA H200");
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->totalGlobalMem = HBM_BYTES;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->l2CacheSize = 62914560;
  return 0;
}

/* Streams and events exist and are always complete; autograd uses both. */
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = (void *)8; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamQuery(void *stream) { return 0; }
int cudaStreamSynchronize(void *stream) { return 0; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)8; return 0; }
int cudaEventRecord(void *event, void *stream) { return 0; }
int cudaEventQuery(void *event) { return 0; }
int cudaEventDestroy(void *event) { return 0; }

/* The driver: no context is ever created. */
int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
int cuGetProcAddress_v2(const char *name, void **address, int version, unsigned long flags, void *status) {
  *address = strcmp(name, "cuDevicePrimaryCtxGetState") ? 0 : (void *)cuDevicePrimaryCtxGetState;
  return *address ? 0 : 500;
}
