// A worker in C++: generated stubs, gRPC and OpenSSL's SHA-256. What it computes: ../README.md.

#include <grpcpp/grpcpp.h>
#include <openssl/evp.h>

#include <array>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ayni/v1/coordinator.grpc.pb.h"

namespace pb = ayni::v1;
using namespace std::chrono_literals;

using Seconds = std::chrono::duration<double>;
using Vector = std::vector<float>;
using Part = std::optional<Vector>;  // Nothing where no micro-batch has weight.

static_assert(std::endian::native == std::endian::little, "vectors travel in little-endian order");

constexpr int64_t kFeatures = 20000, kSamples = 96, kEntries = 8;
constexpr char kTask[] = "ayni example: least squares 1";
// Deadlines of short calls, of those that wait for other workers, and of the whole run.
constexpr Seconds kCall = 30s, kWait = 120s, kRun = 600s;

void Log(const std::string& text) { std::cerr << text + "\n" << std::flush; }

std::string Sha256(const void* data, size_t size) {
  std::array<unsigned char, 32> digest;
  EVP_Digest(data, size, digest.data(), nullptr, EVP_sha256(), nullptr);
  std::string hex;
  for (unsigned char byte : digest) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    hex += digits;
  }
  return hex;
}

// The model. Every operation is rounded to float32 for itself (-ffp-contract=off): then any language gets the same
// bytes.

struct Microbatch {
  Part gradient;
  pb::MicrobatchStats stats;
};

int64_t Feature(int64_t sample, int64_t k) { return (sample * 199 + k * 5970) % kFeatures; }
float Value(int64_t sample, int64_t k) { return static_cast<float>((sample * 7 + k * 13) % 17 - 8); }

// Loss and gradient over the samples at positions start to stop - 1.
Microbatch Compute(const Vector& parameters, uint32_t number, int64_t start, int64_t stop) {
  Vector gradient(kFeatures);
  int64_t total = 0;
  double loss = 0;
  for (int64_t position = start; position < stop; ++position) {
    int64_t sample = position % kSamples, weight = sample / 8 % 4, target = sample * 37 % 101 - 50;
    float prediction = 0;
    for (int64_t k = 0; k < kEntries; ++k) prediction += parameters[Feature(sample, k)] * Value(sample, k);
    float error = prediction - static_cast<float>(target);
    float scaled = static_cast<float>(weight) * error;
    for (int64_t k = 0; k < kEntries; ++k) gradient[Feature(sample, k)] += scaled * Value(sample, k);
    total += weight;
    loss += static_cast<double>(weight) * error * error / 2;
  }
  Microbatch result;
  if (total) result.gradient = std::move(gradient);
  result.stats.set_microbatch(number);
  result.stats.set_weight(total);
  result.stats.set_loss_sum(loss);
  return result;
}

// One step of gradient descent.
void Update(Vector& parameters, const Vector& mean, const pb::CommitStepResponse& commit) {
  const float rate = static_cast<float>(commit.learning_rate()), clip = static_cast<float>(commit.clip_factor());
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i] -= rate * (clip * mean[i]);
}

std::string Digest(const Vector& parameters) { return Sha256(parameters.data(), parameters.size() * sizeof(float)); }

// The tree.

struct Node {
  uint32_t start, stop;
};

// The fewest nodes of the tree over `count` micro-batches that make up start to stop - 1, left to right.
std::vector<Node> Cover(uint32_t start, uint32_t stop, uint32_t count) {
  std::vector<Node> nodes;
  while (start < stop) {
    uint32_t size = 1;
    while (start % (2 * size) == 0 && size < count && std::min(start + 2 * size, count) <= stop) size *= 2;
    nodes.push_back({start, std::min(start + size, count)});
    start = nodes.back().stop;
  }
  return nodes;
}

// The value of a node: left plus right; what is absent is left out.
Part AddUp(std::map<uint32_t, Part>& leaves, Node node) {
  if (node.stop - node.start == 1) return std::move(leaves.at(node.start));
  uint32_t half = 1;
  while (2 * half < node.stop - node.start) half *= 2;
  Part left = AddUp(leaves, {node.start, node.start + half}), right = AddUp(leaves, {node.start + half, node.stop});
  if (!left || !right) return left ? std::move(left) : std::move(right);
  for (size_t i = 0; i < left->size(); ++i) (*left)[i] += (*right)[i];
  return left;
}

// The calls.

// A call that failed. Without a reason the transport broke.
struct CallFailed : std::runtime_error {
  CallFailed(const std::string& reason, const grpc::Status& status)
      : std::runtime_error((reason.empty() ? "status " + std::to_string(status.error_code()) : reason) + ": " +
                           status.error_message()),
        is_dropped_step(reason == "STEP_VOIDED" || reason == "STALE_STEP" || reason == "STALE_EPOCH") {}
  // The next assignment is waited for; nothing of the step counts.
  bool is_dropped_step;
};

void Check(const grpc::Status& status, const grpc::ClientContext& context) {
  if (status.ok()) return;
  const auto& trailing = context.GetServerTrailingMetadata();
  const auto found = trailing.find("ayni-reason");
  throw CallFailed(found == trailing.end() ? "" : std::string(found->second.data(), found->second.size()), status);
}

// Names the lease in a request; RoundBegin and CommitStepRequest have the same fields for it.
template <typename Request>
void NameLease(Request& request, uint32_t worker, const pb::Assignment& lease, const std::vector<Microbatch>& batches) {
  request.set_worker_id(worker);
  request.set_epoch(lease.epoch());
  request.set_step(lease.step());
  request.set_attempt(lease.attempt());
  request.set_lease_id(lease.lease_id());
  request.set_num_buckets(1);
  for (const Microbatch& batch : batches) *request.add_microbatches() = batch.stats;
}

class Worker {
 public:
  Worker(std::shared_ptr<grpc::Channel> channel, std::string token, std::string name)
      : stub_(pb::CoordinatorService::NewStub(channel)), token_(std::move(token)), name_(std::move(name)) {}

  // Takes part in the whole run and prints the result.
  void Run() {
    Join();
    pb::Shutdown end;
    {
      std::jthread heart([this](std::stop_token over) { Beat(over); });
      try {
        end = FollowAssignments();
      } catch (...) {
        Leave();
        throw;
      }
      Leave();
    }
    if (!end.finished()) throw std::runtime_error("the run was stopped: " + end.reason());
    std::printf("{\"language\": \"cpp\", \"worker\": \"%s\", \"steps\": %lld, \"parameters_sha256\": \"%s\", "
                "\"first_loss\": %.17g, \"loss\": %.17g}\n",
                name_.c_str(), static_cast<long long>(end.committed_steps()), Digest(parameters_).c_str(),
                losses_.front(), losses_.back());
  }

 private:
  std::unique_ptr<grpc::ClientContext> Context(Seconds limit) const {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::round<std::chrono::nanoseconds>(limit));
    context->AddMetadata("authorization", "Bearer " + token_);
    if (!session_.empty()) context->AddMetadata("ayni-session", session_);
    return context;
  }

  void Join() {
    auto context = Context(kCall);
    context->set_wait_for_ready(true);
    pb::GetRunResponse run;
    Check(stub_->GetRun(context.get(), pb::GetRunRequest(), &run), *context);
    if (run.protocol_version() != 1) throw std::runtime_error("the coordinator speaks another version of the protocol");
    pb::JoinRequest request;
    request.set_protocol_version(1);
    request.set_worker_name(name_);
    std::random_device random;
    request.set_join_nonce(std::to_string(random()) + "-" + std::to_string(random()));
    request.set_backend("cpu");
    request.add_wire_types(pb::DTYPE_FLOAT32);
    request.set_num_training_samples(kSamples);
    request.set_task_fingerprint(Sha256(kTask, sizeof kTask - 1));
    request.set_task_summary("least squares of the example clients");
    pb::JoinResponse answer;
    context = Context(kCall);
    Check(stub_->Join(context.get(), request, &answer), *context);
    if (answer.wire_type() != pb::DTYPE_FLOAT32 || answer.topology() != "star")
      throw std::runtime_error("this example sends float32 to the coordinator; the run file says something else");
    id_ = answer.worker_id();
    session_ = answer.session();
    interval_ = Seconds(answer.heartbeat_interval().seconds() + answer.heartbeat_interval().nanos() * 1e-9);
    lease_ = Seconds(answer.lease().seconds() + answer.lease().nanos() * 1e-9);
    Log("joined " + answer.run_id() + " as worker " + std::to_string(id_));
  }

  // Gives signs of life. What is wrong with them ends the stream of assignments as well.
  void Beat(std::stop_token over) {
    std::unique_lock lock(mutex_);
    while (!woken_.wait_for(lock, over, interval_, [&] { return over.stop_requested(); })) {
      pb::HeartbeatRequest request = at_;
      request.set_worker_id(id_);
      lock.unlock();
      auto context = Context(lease_);
      pb::HeartbeatResponse response;
      try {
        Check(stub_->Heartbeat(context.get(), request, &response), *context);
      } catch (const CallFailed& error) {
        Log(std::string("no heartbeat: ") + error.what());
      }
      lock.lock();
    }
  }

  void Now(int64_t epoch, int64_t step, const char* activity) {
    std::scoped_lock lock(mutex_);
    at_.set_epoch(epoch);
    at_.set_step(step);
    at_.set_activity(activity);
  }

  pb::Shutdown FollowAssignments() {
    pb::ShardAssignmentRequest request;
    request.set_worker_id(id_);
    request.set_parameters_sha256(Digest(parameters_));
    Now(0, -1, "waiting");
    auto context = Context(kRun);
    auto stream = stub_->ShardAssignment(context.get(), request);
    std::optional<pb::Shutdown> end;
    try {
      pb::ShardAssignmentResponse frame;
      while (stream->Read(&frame)) {
        if (frame.has_assignment()) TryStep(frame.assignment());
        if (frame.has_waiting()) Log(frame.waiting().reason());
        if (frame.has_shutdown()) end = frame.shutdown();
      }
    } catch (...) {
      context->TryCancel();
      stream->Finish();
      throw;
    }
    Check(stream->Finish(), *context);
    if (!end) throw std::runtime_error("the stream of assignments ended without a shutdown");
    Log(end->reason());
    return *end;
  }

  void TryStep(const pb::Assignment& lease) {
    try {
      Step(lease);
    } catch (const CallFailed& error) {
      if (!error.is_dropped_step) throw;
      Log("attempt " + std::to_string(lease.attempt()) + " of step " + std::to_string(lease.step()) +
          " is void: " + error.what());
    }
    Now(lease.epoch(), lease.step(), "waiting");
  }

  void Step(const pb::Assignment& lease) {
    if (lease.kind() != pb::STEP_KIND_TRAIN) throw std::runtime_error("this example does not evaluate");
    if (lease.step() != static_cast<int64_t>(losses_.size()))
      throw std::runtime_error("the run is at step " + std::to_string(lease.step()) + ", but this worker has made " +
                               std::to_string(losses_.size()));
    Now(lease.epoch(), lease.step(), "computing");
    std::vector<Microbatch> batches;
    std::map<uint32_t, Part> leaves;
    for (uint32_t m = lease.microbatch_start(); m < lease.microbatch_stop(); ++m) {
      batches.push_back(Compute(parameters_, m, PositionOf(lease, m), PositionOf(lease, m + 1)));
      leaves[m] = std::move(batches.back().gradient);
    }
    std::vector<Part> parts;
    for (Node node : Cover(lease.microbatch_start(), lease.microbatch_stop(), lease.num_microbatches()))
      parts.push_back(AddUp(leaves, node));
    const Vector mean = Reduce(lease, parts, batches);
    const pb::CommitStepResponse commit = Commit(lease, batches);
    losses_.push_back(commit.global_loss());
    if (commit.total_weight()) Update(parameters_, mean, commit);
  }

  static int64_t PositionOf(const pb::Assignment& lease, int64_t microbatch) {
    return lease.position() + microbatch * lease.num_samples() / lease.num_microbatches();
  }

  // Contributes to the one bucket and returns the mean.
  Vector Reduce(const pb::Assignment& lease, const std::vector<Part>& parts, const std::vector<Microbatch>& batches) {
    Now(lease.epoch(), lease.step(), "exchanging");
    auto context = Context(kWait);
    auto stream = stub_->Gradient(context.get());
    pb::GradientRequest begin;
    pb::RoundBegin& round = *begin.mutable_begin()->mutable_round();
    NameLease(round, id_, lease, batches);
    round.mutable_tensor()->set_dtype(pb::DTYPE_FLOAT32);
    round.mutable_tensor()->set_num_elements(kFeatures);
    stream->Write(begin);
    Vector mean(kFeatures);  // Without any weight there is none.
    size_t received = 0;
    bool is_complete = false;
    std::string fault;
    {
      std::jthread sender;  // Chunks go out while those of the mean come in.
      pb::GradientResponse frame;
      while (stream->Read(&frame)) {
        if (frame.has_accepted())
          sender = std::jthread([&parts, &stream, accepted = frame.accepted()] { Send(*stream, accepted, parts); });
        if (frame.has_complete()) is_complete = true;
        if (!frame.has_chunk()) continue;
        const std::string& data = frame.chunk().data();
        if (frame.chunk().offset_bytes() != received || data.size() > kFeatures * sizeof(float) - received) {
          fault = "a chunk of the mean is not where it should be";
          context->TryCancel();
          break;
        }
        std::memcpy(reinterpret_cast<char*>(mean.data()) + received, data.data(), data.size());
        received += data.size();
      }
    }
    const grpc::Status status = stream->Finish();
    if (!fault.empty()) throw std::runtime_error(fault);
    Check(status, *context);
    if (!is_complete) throw std::runtime_error("a gradient stream ended before it was complete");
    return mean;
  }

  static void Send(grpc::ClientReaderWriter<pb::GradientRequest, pb::GradientResponse>& stream,
                   const pb::RoundAccepted& accepted, const std::vector<Part>& parts) {
    for (size_t number = 0; number < parts.size() && !accepted.already_held(); ++number) {
      if (!parts[number]) continue;
      const char* data = reinterpret_cast<const char*>(parts[number]->data());
      const size_t size = parts[number]->size() * sizeof(float);
      for (size_t offset = 0; offset < size; offset += accepted.chunk_bytes()) {
        pb::GradientRequest request;
        request.mutable_chunk()->set_offset_bytes(offset);
        request.mutable_chunk()->set_part(static_cast<uint32_t>(number));
        request.mutable_chunk()->set_data(data + offset, std::min<size_t>(accepted.chunk_bytes(), size - offset));
        if (!stream.Write(request)) return;  // The status says why.
      }
    }
    stream.WritesDone();
  }

  pb::CommitStepResponse Commit(const pb::Assignment& lease, const std::vector<Microbatch>& batches) {
    Now(lease.epoch(), lease.step(), "waiting");
    pb::CommitStepRequest request;
    NameLease(request, id_, lease, batches);
    request.set_kind(lease.kind());
    request.set_parameters_sha256(Digest(parameters_));
    pb::CommitStepResponse commit;
    auto context = Context(kWait);
    Check(stub_->CommitStep(context.get(), request, &commit), *context);
    return commit;
  }

  void Leave() {
    pb::LeaveRequest request;
    request.set_worker_id(id_);
    request.set_reason("the run is over");
    request.set_parameters_sha256(Digest(parameters_));
    pb::LeaveResponse response;
    auto context = Context(kCall);
    stub_->Leave(context.get(), request, &response);
  }

  std::unique_ptr<pb::CoordinatorService::Stub> stub_;
  std::string token_, name_, session_;
  uint32_t id_ = 0;
  Seconds interval_{}, lease_{};
  Vector parameters_ = Vector(kFeatures);
  std::vector<double> losses_;
  std::mutex mutex_;  // Guards at_.
  std::condition_variable_any woken_;
  pb::HeartbeatRequest at_;
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("can't read " + path);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

int main(int argc, char** argv) try {
  std::map<std::string, std::string> given;
  for (int i = 1; i + 1 < argc; i += 2) given[argv[i]] = argv[i + 1];
  if (!given.count("--coordinator") || !given.count("--token-file") || !given.count("--name"))
    throw std::runtime_error("usage: worker --coordinator HOST:PORT --token-file FILE --name NAME [--ca FILE]");
  std::string token = ReadFile(given["--token-file"]);
  token.erase(token.find_last_not_of(" \r\n") + 1);
  grpc::SslCredentialsOptions options;
  if (given.count("--ca")) options.pem_root_certs = ReadFile(given["--ca"]);
  auto credentials = given.count("--ca") ? grpc::SslCredentials(options) : grpc::InsecureChannelCredentials();
  Worker(grpc::CreateChannel(given["--coordinator"], credentials), token, given["--name"]).Run();
  return 0;
} catch (const std::exception& error) {
  Log(error.what());
  return 1;
}
