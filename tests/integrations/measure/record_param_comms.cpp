// What ProcessGroupNCCL does before each of its calls, without NCCL: so that the profiler on a CPU writes what it
// writes on a GPU. Called through ctypes.
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

extern "C" void record_param_comms(int64_t sequence, bool point_to_point, const char* name, const char* description,
                                   int rank, const char* collective, int64_t sent, int64_t received, int dtype,
                                   int first_rank, int stride, int size, bool asynchronous) {
  const std::vector<at::Tensor> tensors;
  const std::vector<int64_t> splits;
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(
      std::make_tuple(sequence, point_to_point), std::make_tuple(std::string(name), std::string(description)), tensors,
      tensors, rank, collective, sent, received, static_cast<at::ScalarType>(dtype), splits, splits, first_rank, stride,
      size, asynchronous);
}
