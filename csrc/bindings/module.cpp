// The extension module moe_runtime._C: importing it registers the ops' schemas and CPU kernels. It exports no Python
// name.
#include <Python.h>
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(moe_runtime, library) {
  library.def("route(Tensor ids_TK, int num_experts) -> (Tensor slot_R, Tensor row_TK, Tensor ends_E)");
  library.def("gather_rows(Tensor x_TD, Tensor slot_R, Tensor ends_E, int top_k) -> Tensor");
  library.def("gather_sum(Tensor y_RD, Tensor row_TK) -> Tensor");
  library.def("swiglu(Tensor h_RH, Tensor? gate_R, bool interleaved) -> Tensor");
  library.def(
      "swiglu_backward(Tensor da_RF, Tensor h_RH, Tensor? gate_R, bool interleaved) -> (Tensor dh_RH, Tensor dgate_R)");
}

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
