// SPDX-License-Identifier: Apache-2.0
// A call from XLA: arrays, attributes and threads, as its C interface hands them over. The C++ one
// takes a compiler two seconds for every file that includes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "stored_rows.h"
#include "xla/ffi/api/c_api.h"

namespace tsjax {

template <class T>
constexpr XLA_FFI_DataType TYPE = XLA_FFI_DataType_INVALID;
template <>
inline constexpr XLA_FFI_DataType TYPE<float> = XLA_FFI_DataType_F32;
template <>
inline constexpr XLA_FFI_DataType TYPE<int8_t> = XLA_FFI_DataType_S8;

// One of a call's arrays.
class Array {
 public:
  explicit Array(const XLA_FFI_Buffer* buffer) : buffer_(buffer) {}

  int64_t dim(int64_t axis) const { return buffer_->dims[axis]; }
  int64_t last() const { return dim(buffer_->rank - 1); }
  int64_t size() const {
    int64_t size = 1;
    for (int64_t axis = 0; axis < buffer_->rank; axis++) size *= dim(axis);
    return size;
  }
  template <class T>
  bool is() const {
    return buffer_->dtype == TYPE<T>;
  }
  // Its numbers; nullptr if it has none.
  template <class T>
  T* data() const {
    return size() ? static_cast<T*>(buffer_->data) : nullptr;
  }

 private:
  const XLA_FFI_Buffer* buffer_;
};

class Call {
 public:
  explicit Call(XLA_FFI_CallFrame* frame) : frame_(frame) {}

  Array argument(int64_t i) const { return array(frame_->args.args[i]); }
  Array result(int64_t i) const { return array(frame_->rets.rets[i]); }

  // Attributes are in the order of their names.
  template <class T>
  T attribute(int64_t i) const {
    return *static_cast<T*>(static_cast<XLA_FFI_Scalar*>(frame_->attrs.attrs[i])->value);
  }

  // XLA's threads, and a task for one of them.
  int64_t num_threads() const {
    int64_t count = 1;
    XLA_FFI_ThreadPool_NumThreads_Args args{
        XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, frame_->ctx, &count};
    ignore(frame_->api->XLA_FFI_ThreadPool_NumThreads(&args));
    return count;
  }
  template <class Task>
  void Schedule(Task task) const {
    auto* own = new Task(std::move(task));
    XLA_FFI_ThreadPool_Schedule_Args args{
        XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, frame_->ctx, run<Task>, own};
    if (ignore(frame_->api->XLA_FFI_ThreadPool_Schedule(&args))) run<Task>(own);
  }

 private:
  static Array array(void* buffer) { return Array(static_cast<XLA_FFI_Buffer*>(buffer)); }

  template <class Task>
  static void run(void* task) {
    (*static_cast<Task*>(task))();
    delete static_cast<Task*>(task);
  }

  bool ignore(XLA_FFI_Error* error) const {
    if (!error) return false;
    XLA_FFI_Error_Destroy_Args args{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
    frame_->api->XLA_FFI_Error_Destroy(&args);
    return true;
  }

  XLA_FFI_CallFrame* frame_;
};

// The operand that says which rows [B, T, ...] are wanted: [B], or empty for all.
inline Live live_of(const Array& counts, const Array& rows) {
  return {counts.data<int32_t>(), counts.size() ? rows.dim(1) : 1};
}

// A cache's rows and the operand with their exponents, which is empty for rows of T.
template <class T>
Stored<T> cache_of(const Array& rows, const Array& exponents) {
  if (!exponents.size()) return rows.data<T>();
  return {rows.data<int8_t>(), exponents.data<int8_t>()};
}

// How many of each a kernel takes.
struct Counts {
  int64_t arguments, results, attributes = 0;
};

// Runs handle(call), or tells XLA which interface this was compiled with, if it asks for that.
template <class Handle>
XLA_FFI_Error* answer(XLA_FFI_CallFrame* frame, Counts counts, Handle handle) {
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    auto* asked = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start);
    asked->metadata->api_version = XLA_FFI_Api_Version{
        XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    asked->metadata->traits = 0;
    asked->metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return nullptr;
  }
  if (frame->args.size != counts.arguments || frame->rets.size != counts.results ||
      frame->attrs.size != counts.attributes) {
    XLA_FFI_Error_Create_Args error{
        XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr,
        "a kernel of tsjax was called with too few or too many arrays or attributes",
        XLA_FFI_Error_Code_INVALID_ARGUMENT};
    return frame->api->XLA_FFI_Error_Create(&error);
  }
  Call call(frame);
  handle(call);
  return nullptr;
}

}  // namespace tsjax
