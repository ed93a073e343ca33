/* A CUDA runtime and driver with one device that can do nothing, for backward passes of fake tensors: autograd
   asks how many devices there are, which one is current and whether it has a context. Loaded before torch:
     gcc -shared -fPIC -Wl,-soname,libcuda.so.1 fake_driver.c -o libcuda.so.1
     LD_PRELOAD=./libcuda.so.1 python ... */
#define ANSWERS(name) int name(void) { return 0; }
int cudaGetDeviceCount(int *n) { *n = 1; return 0; }
int cudaGetDevice(int *d) { *d = 0; return 0; }
ANSWERS(cudaSetDevice)
int cudaGetDriverEntryPoint(const char *s, void **f, unsigned long long g, int *r) {
    (void)s; (void)g; *f = (void *)cudaSetDevice; if (r) *r = 0; return 0;
}
int cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, unsigned long long g, int *r) {
    (void)v; return cudaGetDriverEntryPoint(s, f, g, r);
}
int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
int cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
int cudaDeviceGetStreamPriorityRange(int *a, int *b) { if (a) *a = 0; if (b) *b = -5; return 0; }
int cudaStreamIsCapturing(void *s, int *c) { (void)s; *c = 0; return 0; }
ANSWERS(cudaStreamQuery)
ANSWERS(cudaEventQuery)
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { (void)d; if (f) *f = 0; if (a) *a = 0; return 0; }
ANSWERS(cuInit)
ANSWERS(cuDriverGetVersion)
ANSWERS(cuDeviceGet)
ANSWERS(cuDeviceGetCount)
ANSWERS(cuDeviceGetAttribute)
ANSWERS(cuCtxGetCurrent)
ANSWERS(cuCtxSetCurrent)
ANSWERS(cuCtxGetDevice)
ANSWERS(cuCtxFromGreenCtx)
ANSWERS(cuDevicePrimaryCtxRetain)
ANSWERS(cuModuleGetFunction)
ANSWERS(cuModuleLoadData)
ANSWERS(cuModuleLoadDataEx)
ANSWERS(cuLaunchKernel)
ANSWERS(cuLaunchKernelEx)
ANSWERS(cuLaunchCooperativeKernel)
ANSWERS(cuGetErrorString)
ANSWERS(cuGetErrorName)
ANSWERS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
ANSWERS(cuOccupancyMaxActiveClusters)
ANSWERS(cuLinkCreate)
ANSWERS(cuLinkAddData)
ANSWERS(cuLinkComplete)
ANSWERS(cuFuncSetAttribute)
ANSWERS(cuFuncGetAttribute)
ANSWERS(cuPointerGetAttribute)
ANSWERS(cuTensorMapEncodeTiled)
ANSWERS(cuTensorMapEncodeIm2col)
ANSWERS(cuGetProcAddress)
ANSWERS(cuGetProcAddress_v2)
ANSWERS(cuCtxGetLimit)
ANSWERS(cuFuncSetCacheConfig)
