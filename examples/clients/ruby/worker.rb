# frozen_string_literal: true

# A worker of the least-squares example: joins a coordinator, contributes gradients, takes the means, steps.
#
# Ruby's Float is binary64. A sum, difference or product of two float32 values that is made in binary64 and then
# rounded to float32 is the float32 result, because 53 bits are more than twice 24; so rounding each result is enough.

require "ayni/v1/coordinator_services_pb"
require "digest"
require "json"
require "optparse"
require "securerandom"

Pb = Ayni::V1

# Rounds numbers to float32.
module Float32
  def self.round(value) = [value].pack("e").unpack1("e")

  def self.round_all(values) = values.pack("e*").unpack("e*")

  def self.add(left, right) = round_all(left.each_with_index.map { |value, i| value + right[i] })

  def self.bytes(values) = values.pack("e*")

  def self.parse(bytes) = bytes.unpack("e*")
end

# The canonical tree over a step's micro-batches.
module Tree
  # Returns the fewest nodes that make up [start, stop), left to right.
  def self.cover(start, stop, count)
    nodes = []
    while start < stop
      size = 1
      size *= 2 while (start % (2 * size)).zero? && size < count && [start + 2 * size, count].min <= stop
      nodes << [start, [start + size, count].min]
      start = nodes.last[1]
    end
    nodes
  end

  # Returns the sum of a node's leaves, left plus right; nil where none has weight.
  def self.sum(leaves, start, stop)
    return leaves[start] if stop - start == 1

    middle = start + (1 << ((stop - start - 1).bit_length - 1))
    left, right = sum(leaves, start, middle), sum(leaves, middle, stop)
    left && right ? Float32.add(left, right) : left || right
  end
end

# Sparse weighted least squares over samples that formulas make.
class LeastSquares
  FEATURES, SAMPLES, ENTRIES = 20_000, 96, 8

  def initialize = @parameters = [0.0] * FEATURES

  def digest = Digest::SHA256.hexdigest(Float32.bytes(@parameters))

  # Returns statistics of each leased micro-batch, and a sum (nil without weight) for each part.
  def compute(lease)
    leaves = {}
    stats = (lease.microbatch_start...lease.microbatch_stop).map do |m|
      leaves[m], stat = differentiate(lease, m)
      stat
    end
    nodes = Tree.cover(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches)
    [stats, nodes.map { |start, stop| Tree.sum(leaves, start, stop) }]
  end

  def update(mean, commit)
    return if commit.total_weight.zero?

    rate, clip = Float32.round(commit.learning_rate), Float32.round(commit.clip_factor)
    clipped = Float32.round_all(mean.map { |value| clip * value })
    steps = Float32.round_all(clipped.map { |value| rate * value })
    @parameters = Float32.round_all(@parameters.each_with_index.map { |value, i| value - steps[i] })
  end

  private

  def differentiate(lease, number)
    gradient, weight, loss = [0.0] * FEATURES, 0, 0.0
    (edge(lease, number)...edge(lease, number + 1)).each do |position|
      sample = position % SAMPLES
      w, error = sample / 8 % 4, error_of(sample)
      add(gradient, sample, Float32.round(w * error))
      weight += w
      loss += w * error * error / 2
    end
    [weight.zero? ? nil : gradient, Pb::MicrobatchStats.new(microbatch: number, weight: weight, loss_sum: loss)]
  end

  def edge(lease, number) = lease.position + number * lease.num_samples / lease.num_microbatches

  def error_of(sample)
    prediction = entries(sample).reduce(0.0) do |sum, (feature, value)|
      Float32.round(sum + Float32.round(@parameters[feature] * value))
    end
    Float32.round(prediction - (sample * 37 % 101 - 50))
  end

  def add(gradient, sample, scaled)
    entries(sample).each do |feature, value|
      gradient[feature] = Float32.round(gradient[feature] + Float32.round(scaled * value))
    end
  end

  def entries(sample)
    (0...ENTRIES).map { |k| [(sample * 199 + k * 5970) % FEATURES, (sample * 7 + k * 13) % 17 - 8] }
  end
end

# One membership.
class Worker
  CALL_SECONDS, STEP_SECONDS, RUN_SECONDS = 30, 120, 600
  # After these nothing of the attempt counts, and another assignment comes.
  VOID = %w[STEP_VOIDED STALE_STEP STALE_EPOCH].freeze

  def initialize(stub, token, name)
    @stub, @name = stub, name
    @metadata = { "authorization" => "Bearer #{token}" }
    @model = LeastSquares.new
    @epoch, @step, @losses = 0, -1, []
  end

  def run
    join
    heartbeats = Thread.new { beat }
    reason = "it failed"
    finish = train
    reason = "the run is over"
    report(finish)
  ensure
    heartbeats&.kill
    leave(reason) if heartbeats
  end

  private

  def options(seconds) = { metadata: @metadata, deadline: Time.now + seconds }

  def join
    run = @stub.get_run(Pb::GetRunRequest.new, **options(CALL_SECONDS))
    raise "the coordinator speaks another version of the protocol than 1" unless run.protocol_version == 1

    @membership = @stub.join(join_request, **options(CALL_SECONDS))
    raise "this example sends float32 only; set the run's wire_type" unless @membership.wire_type == :DTYPE_FLOAT32
    raise "this example contributes to the coordinator only; set topology: star" unless @membership.topology == "star"

    @metadata = @metadata.merge("ayni-session" => @membership.session)
    warn "joined run #{@membership.run_id} as worker #{@membership.worker_id}"
  end

  def join_request
    Pb::JoinRequest.new(
      protocol_version: 1,
      worker_name: @name,
      join_nonce: SecureRandom.hex(16),
      backend: "cpu",
      wire_types: [:DTYPE_FLOAT32],
      num_training_samples: LeastSquares::SAMPLES,
      task_fingerprint: Digest::SHA256.hexdigest("ayni example: least squares 1"),
      task_summary: "least squares of the example clients"
    )
  end

  # Says that the worker is alive, beside everything else. A broken transport may pass, within a lease.
  def beat
    interval, lease = seconds(@membership.heartbeat_interval), seconds(@membership.lease)
    answered = Process.clock_gettime(Process::CLOCK_MONOTONIC)
    loop do
      sleep interval
      @stub.heartbeat(heartbeat, **options(lease))
      answered = Process.clock_gettime(Process::CLOCK_MONOTONIC)
    rescue GRPC::BadStatus => error
      expired = Process.clock_gettime(Process::CLOCK_MONOTONIC) - answered > lease
      give_up(error) if expired || !reason_of(error).empty?
    end
  end

  def heartbeat
    Pb::HeartbeatRequest.new(worker_id: @membership.worker_id, epoch: @epoch, step: @step, activity: "computing")
  end

  # Ends the process from the thread of the heartbeats, where an exception would reach nobody.
  def give_up(error)
    warn describe(error)
    exit!(1)
  end

  # Takes assignments until the run is over.
  def train
    request = Pb::ShardAssignmentRequest.new(worker_id: @membership.worker_id, parameters_sha256: @model.digest)
    @stub.shard_assignment(request, **options(RUN_SECONDS)).each do |response|
      case response.frame # The others are for elastic workers.
      when :assignment then attempt(response.assignment)
      when :waiting then warn response.waiting.reason
      when :shutdown then return response.shutdown
      end
    end
    raise "the coordinator ended the assignments without saying that the run is over"
  end

  def attempt(lease)
    raise "this example does not evaluate" unless lease.kind == :STEP_KIND_TRAIN
    raise "this worker has missed a commit" unless lease.step == @losses.size

    @epoch, @step = lease.epoch, lease.step
    stats, parts = @model.compute(lease)
    mean = reduce(lease, stats, parts)
    commit = commit(lease, stats)
    @model.update(mean, commit)
    @losses << commit.global_loss
  rescue GRPC::BadStatus => error
    raise unless VOID.include?(reason_of(error))

    warn "attempt #{lease.attempt} of step #{lease.step} is void: #{describe(error)}"
  end

  # Contributes the shard's sums and returns the mean, which may begin to come before the last sum has left.
  def reduce(lease, stats, parts)
    accepted = Queue.new
    # The library takes requests on a thread of its own; answers are taken here.
    responses = @stub.gradient(requests(lease, stats, parts, accepted), **options(STEP_SECONDS))
    receive(responses, accepted)
  ensure
    accepted << nil
  end

  def requests(lease, stats, parts, accepted)
    Enumerator.new do |out|
      out << Pb::GradientRequest.new(begin: Pb::GradientBegin.new(round: round(lease, stats)))
      answer = accepted.pop
      parts.each_with_index { |sum, part| send_part(out, part, sum, answer) } if answer && !answer.already_held
    end
  end

  def round(lease, stats)
    tensor = Pb::TensorSpec.new(dtype: :DTYPE_FLOAT32, num_elements: LeastSquares::FEATURES)
    Pb::RoundBegin.new(**names(lease), tensor: tensor, microbatches: stats, num_buckets: 1)
  end

  def names(lease)
    { worker_id: @membership.worker_id, epoch: lease.epoch, step: lease.step, attempt: lease.attempt,
      lease_id: lease.lease_id }
  end

  # Every chunk but the last one has exactly the length that the coordinator named.
  def send_part(out, part, sum, accepted)
    data = sum ? Float32.bytes(sum) : ""
    (0...data.bytesize).step(accepted.chunk_bytes) do |offset|
      content = data.byteslice(offset, accepted.chunk_bytes)
      out << Pb::GradientRequest.new(chunk: Pb::Chunk.new(offset_bytes: offset, part: part, data: content))
    end
  end

  def receive(responses, accepted)
    mean, complete = String.new(encoding: Encoding::BINARY), false
    responses.each do |response|
      case response.frame
      when :accepted then accepted << response.accepted
      when :chunk then append(mean, response.chunk)
      when :complete then complete = true
      end
    end
    raise "the mean came without its end" unless complete && [0, 4 * LeastSquares::FEATURES].include?(mean.bytesize)

    # Where nothing has weight there is no mean, and no update.
    Float32.parse(mean)
  end

  def append(mean, chunk)
    fits = mean.bytesize + chunk.data.bytesize <= 4 * LeastSquares::FEATURES
    raise "a chunk of the mean is out of place" unless fits && chunk.offset_bytes == mean.bytesize

    mean << chunk.data
  end

  def commit(lease, stats)
    request = Pb::CommitStepRequest.new(
      **names(lease), kind: lease.kind, num_buckets: 1, microbatches: stats, parameters_sha256: @model.digest
    )
    @stub.commit_step(request, **options(STEP_SECONDS))
  end

  def leave(reason)
    request = Pb::LeaveRequest.new(worker_id: @membership.worker_id, reason: reason, parameters_sha256: @model.digest)
    @stub.leave(request, **options(10))
  rescue GRPC::BadStatus => error
    warn "the coordinator did not hear the goodbye: #{describe(error)}"
  end

  def report(finish)
    warn "the run is over: #{finish.reason}"
    raise "the run was stopped before its last step" unless finish.finished

    { language: "ruby", worker: @name, steps: finish.committed_steps, parameters_sha256: @model.digest,
      first_loss: @losses.first, loss: @losses.last }
  end

  def seconds(duration) = duration.seconds + duration.nanos / 1e9
end

# Returns the reason of a refusal; empty where the transport broke.
def reason_of(error) = error.metadata.fetch("ayni-reason", "")

def describe(error)
  return error.message unless error.is_a?(GRPC::BadStatus)

  name = reason_of(error)
  "#{name.empty? ? error.class.name.split('::').last : name}: #{error.details}"
end

def flags
  given = {}
  parser = OptionParser.new do |options|
    options.on("--coordinator ADDRESS") { |value| given[:coordinator] = value }
    options.on("--token-file FILE") { |value| given[:token_file] = value }
    options.on("--name NAME") { |value| given[:name] = value }
    options.on("--ca FILE") { |value| given[:ca] = value }
  end
  parser.parse!
  missing = %i[coordinator token_file name] - given.keys
  raise "missing: #{missing.join(', ')}" unless missing.empty?

  given
end

def main
  given = flags
  credentials = given[:ca] ? GRPC::Core::ChannelCredentials.new(File.read(given[:ca])) : :this_channel_is_insecure
  stub = Pb::CoordinatorService::Stub.new(given[:coordinator], credentials)
  puts JSON.generate(Worker.new(stub, File.read(given[:token_file]).strip, given[:name]).run)
rescue StandardError => error
  warn describe(error)
  exit 1
end

main
