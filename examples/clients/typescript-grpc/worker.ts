// A worker of the least-squares example, over ts-proto and grpc-js: joins a coordinator, contributes gradients, takes
// the means, steps. Numbers of JavaScript are binary64. A sum, difference or product of two float32 values that is made
// in binary64 and then rounded to float32 (Math.fround, or a store into a Float32Array) is the float32 result.

import { type CallOptions, credentials, Metadata, type ServiceError } from "@grpc/grpc-js";
import { createHash, randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { Readable, type Writable } from "node:stream";
import { parseArgs } from "node:util";
import {
  Assignment,
  CommitStepRequest,
  CommitStepResponse,
  CoordinatorServiceClient,
  GetRunRequest,
  GradientRequest,
  type GradientResponse,
  HeartbeatRequest,
  JoinRequest,
  JoinResponse,
  LeaveRequest,
  MicrobatchStats,
  type RoundAccepted,
  ShardAssignmentRequest,
  ShardAssignmentResponse,
  type Shutdown,
  StepKind,
} from "./gen/ayni/v1/coordinator.js";
import { type Chunk, DType } from "./gen/ayni/v1/tensor.js";
import type { Duration } from "./gen/google/protobuf/duration.js";

const FEATURES = 20000;
const SAMPLES = 96;
const ENTRIES = 8;
const CALL = 30_000;
const STEP = 120_000;
const RUN = 600_000;
// After these nothing of the attempt counts, and another assignment comes.
const VOID = new Set(["STEP_VOIDED", "STALE_STEP", "STALE_EPOCH"]);

const f32 = Math.fround;

// What a lease contributes: statistics of each micro-batch, and a sum for each part (undefined without weight).
type Shard = { microbatches: MicrobatchStats[]; parts: (Float32Array | undefined)[] };
type Node = { start: number; stop: number };

// The model: sparse weighted least squares over samples that formulas make.
class LeastSquares {
  private readonly parameters = new Float32Array(FEATURES);

  digest(): string {
    return sha256(bytes(this.parameters));
  }

  compute(lease: Assignment): Shard {
    const microbatches: MicrobatchStats[] = [];
    const leaves: (Float32Array | undefined)[] = [];
    for (let m = lease.microbatchStart; m < lease.microbatchStop; m++) {
      const gradient = new Float32Array(FEATURES);
      const stats = this.differentiate(lease, m, gradient);
      leaves[m] = stats.weight > 0n ? gradient : undefined;
      microbatches.push(stats);
    }
    const nodes = cover(lease.microbatchStart, lease.microbatchStop, lease.numMicrobatches);
    return { microbatches, parts: nodes.map((node) => addUp(leaves, node)) };
  }

  update(mean: Float32Array, commit: CommitStepResponse): void {
    if (commit.totalWeight === 0n) return;
    const [rate, clip] = [f32(commit.learningRate), f32(commit.clipFactor)];
    for (let i = 0; i < FEATURES; i++) {
      this.parameters[i] = f32(this.parameters[i] - f32(rate * f32(clip * mean[i])));
    }
  }

  // Adds one micro-batch's gradient, and returns its weight and loss.
  private differentiate(lease: Assignment, microbatch: number, gradient: Float32Array): MicrobatchStats {
    let [weight, lossSum] = [0, 0];
    for (let position = edge(lease, microbatch); position < edge(lease, microbatch + 1); position++) {
      const sample = Number(position % BigInt(SAMPLES));
      const w = Math.floor(sample / 8) % 4;
      const error = this.error(sample);
      const scaled = f32(w * error);
      for (const [feature, value] of entries(sample)) {
        gradient[feature] = f32(gradient[feature] + f32(scaled * value));
      }
      weight += w;
      lossSum += (w * error * error) / 2;
    }
    return MicrobatchStats.fromPartial({ microbatch, weight: BigInt(weight), lossSum });
  }

  private error(sample: number): number {
    let prediction = 0;
    for (const [feature, value] of entries(sample)) {
      prediction = f32(prediction + f32(this.parameters[feature] * value));
    }
    return f32(prediction - (((sample * 37) % 101) - 50));
  }
}

function entries(sample: number): [feature: number, value: number][] {
  return Array.from({ length: ENTRIES }, (_, k) => [
    (sample * 199 + k * 5970) % FEATURES,
    ((sample * 7 + k * 13) % 17) - 8,
  ]);
}

function edge(lease: Assignment, microbatch: number): bigint {
  return lease.position + (BigInt(microbatch) * lease.numSamples) / BigInt(lease.numMicrobatches);
}

// The fewest nodes of the canonical tree that make up [start, stop), left to right.
function cover(start: number, stop: number, count: number): Node[] {
  const nodes: Node[] = [];
  while (start < stop) {
    let size = 1;
    while (start % (2 * size) === 0 && size < count && Math.min(start + 2 * size, count) <= stop) size *= 2;
    nodes.push({ start, stop: Math.min(start + size, count) });
    start = nodes[nodes.length - 1].stop;
  }
  return nodes;
}

// The sum of a node's leaves, left plus right; undefined where none has weight.
function addUp(leaves: (Float32Array | undefined)[], { start, stop }: Node): Float32Array | undefined {
  if (stop - start === 1) return leaves[start];
  let half = 1;
  while (2 * half < stop - start) half *= 2;
  const left = addUp(leaves, { start, stop: start + half });
  const right = addUp(leaves, { start: start + half, stop });
  return left && right ? left.map((value, i) => f32(value + right[i])) : (left ?? right);
}

// A method of the generated client that takes one message and answers with one.
type Unary<Q, A> = (
  request: Q,
  metadata: Metadata,
  options: Partial<CallOptions>,
  callback: (error: ServiceError | null, answer: A) => void,
) => unknown;

// The generated client, with the metadata of every call, and promises in place of callbacks.
class Coordinator {
  readonly metadata = new Metadata();

  constructor(
    readonly stub: CoordinatorServiceClient,
    token: string,
  ) {
    this.metadata.set("authorization", `Bearer ${token}`);
  }

  call<Q, A>(method: Unary<Q, A>, request: Q, timeout: number): Promise<A> {
    return new Promise((resolve, reject) =>
      method.call(this.stub, request, this.metadata, within(timeout), (error, answer) =>
        error ? reject(error) : resolve(answer),
      ),
    );
  }
}

// One membership.
class Worker {
  private readonly model = new LeastSquares();
  private readonly losses: number[] = [];
  private at = { epoch: 0n, step: -1n };

  constructor(
    private readonly coordinator: Coordinator,
    private readonly membership: JoinResponse,
  ) {}

  async run(): Promise<object> {
    const heartbeats = this.startHeartbeats();
    let reason = "it failed";
    try {
      const end = await this.train();
      reason = "the run is over";
      console.error(`the run is over: ${end.reason}`);
      check(end.finished, "the run was stopped before its last step");
      return {
        steps: Number(end.committedSteps),
        parameters_sha256: this.model.digest(),
        first_loss: this.losses[0],
        loss: this.losses[this.losses.length - 1],
      };
    } finally {
      clearInterval(heartbeats);
      await this.leave(reason);
    }
  }

  // Says that the worker is alive, beside everything else. A broken transport may pass, within a lease.
  private startHeartbeats(): NodeJS.Timeout {
    const [interval, lease] = [millis(this.membership.heartbeatInterval), millis(this.membership.lease)];
    let answered = performance.now();
    const beat = async () => {
      try {
        const { workerId } = this.membership;
        const request = HeartbeatRequest.fromPartial({ workerId, ...this.at, activity: "computing" });
        await this.coordinator.call(this.coordinator.stub.heartbeat, request, lease);
        answered = performance.now();
      } catch (error) {
        if (reasonOf(error) || performance.now() - answered > lease) fail(error);
      }
    };
    return setInterval(beat, interval);
  }

  // Takes assignments until the run is over.
  private async train(): Promise<Shutdown> {
    const { stub, metadata } = this.coordinator;
    const fields = { workerId: this.membership.workerId, parametersSha256: this.model.digest() };
    const request = ShardAssignmentRequest.fromPartial(fields);
    const stream: AsyncIterable<ShardAssignmentResponse> = stub.shardAssignment(request, metadata, within(RUN));
    for await (const { frame } of stream) {
      // The other frames are for elastic workers.
      if (frame?.$case === "assignment") await this.attempt(frame.value);
      if (frame?.$case === "waiting") console.error(frame.value.reason);
      if (frame?.$case === "shutdown") return frame.value;
    }
    throw new Error("the coordinator ended the assignments without saying that the run is over");
  }

  private async attempt(lease: Assignment): Promise<void> {
    check(lease.kind === StepKind.STEP_KIND_TRAIN, "this example does not evaluate");
    check(Number(lease.step) === this.losses.length, "this worker has missed a commit");
    this.at = { epoch: lease.epoch, step: lease.step };
    try {
      const shard = this.model.compute(lease);
      const mean = await this.reduce(lease, shard);
      const commit = await this.commit(lease, shard);
      this.model.update(mean, commit);
      this.losses.push(commit.globalLoss);
    } catch (error) {
      if (!VOID.has(reasonOf(error))) throw error;
      console.error(`attempt ${lease.attempt} of step ${lease.step} is void: ${describe(error)}`);
    }
  }

  // Contributes the shard's sums and returns the mean, which may begin to come before the last sum has left.
  private async reduce(lease: Assignment, { microbatches, parts }: Shard): Promise<Float32Array> {
    const stream = this.coordinator.stub.gradient(this.coordinator.metadata, within(STEP));
    // The library's type leaves out that it is a stream of Node.js, which it is.
    const sink = stream as unknown as Writable;
    const tensor = { dtype: DType.DTYPE_FLOAT32, numElements: BigInt(FEATURES) };
    const round = { ...this.names(lease), tensor, microbatches, numBuckets: 1 };
    stream.write(GradientRequest.fromPartial({ frame: { $case: "begin", value: { round } } }));
    const mean = new Mean();
    for await (const { frame } of stream as AsyncIterable<GradientResponse>) {
      // A pipe waits when the coordinator reads slowly, ends the sending side, and leaves this loop free to receive.
      if (frame?.$case === "accepted") Readable.from(contribution(parts, frame.value)).pipe(sink);
      if (frame?.$case === "chunk") mean.append(frame.value);
      if (frame?.$case === "complete") mean.complete = true;
    }
    return mean.values();
  }

  private commit(lease: Assignment, { microbatches }: Shard): Promise<CommitStepResponse> {
    const fields = { ...this.names(lease), kind: lease.kind, numBuckets: 1, microbatches };
    const request = CommitStepRequest.fromPartial({ ...fields, parametersSha256: this.model.digest() });
    return this.coordinator.call(this.coordinator.stub.commitStep, request, STEP);
  }

  private names({ epoch, step, attempt, leaseId }: Assignment) {
    return { workerId: this.membership.workerId, epoch, step, attempt, leaseId };
  }

  private async leave(reason: string): Promise<void> {
    const fields = { workerId: this.membership.workerId, reason, parametersSha256: this.model.digest() };
    try {
      await this.coordinator.call(this.coordinator.stub.leave, LeaveRequest.fromPartial(fields), 10_000);
    } catch (error) {
      console.error(`the coordinator did not hear the goodbye: ${describe(error)}`);
    }
  }
}

// Every chunk but a part's last one has exactly the length that the coordinator named.
function* contribution(
  parts: (Float32Array | undefined)[],
  { chunkBytes, alreadyHeld }: RoundAccepted,
): Generator<GradientRequest> {
  for (const [part, sum] of parts.entries()) {
    const data = sum && !alreadyHeld ? bytes(sum) : Buffer.alloc(0);
    for (let offset = 0; offset < data.length; offset += chunkBytes) {
      const value = { offsetBytes: BigInt(offset), part, data: data.subarray(offset, offset + chunkBytes) };
      yield GradientRequest.fromPartial({ frame: { $case: "chunk", value } });
    }
  }
}

// The mean as it comes. Where nothing has weight there is none, and no update.
class Mean {
  complete = false;
  private readonly data = Buffer.alloc(4 * FEATURES);
  private received = 0;

  append({ offsetBytes, data }: Chunk): void {
    const fits = Number(offsetBytes) === this.received && this.received + data.length <= this.data.length;
    check(fits, "a chunk of the mean is out of place");
    this.data.set(data, this.received);
    this.received += data.length;
  }

  values(): Float32Array {
    const whole = this.received === 0 || this.received === this.data.length;
    check(this.complete && whole, "the mean came without its end");
    return Float32Array.from({ length: FEATURES }, (_, i) => this.data.readFloatLE(4 * i));
  }
}

function bytes(values: Float32Array): Buffer {
  const data = Buffer.alloc(4 * values.length);
  values.forEach((value, i) => data.writeFloatLE(value, 4 * i));
  return data;
}

function sha256(data: Buffer | string): string {
  return createHash("sha256").update(data).digest("hex");
}

function millis(duration: Duration | undefined): number {
  return duration ? Number(duration.seconds) * 1000 + duration.nanos / 1e6 : 1000;
}

function within(milliseconds: number): { deadline: number } {
  return { deadline: Date.now() + milliseconds };
}

function check(holds: boolean, sentence: string): void {
  if (!holds) throw new Error(sentence);
}

function isRefusal(error: unknown): error is ServiceError {
  return error instanceof Error && "details" in error && "metadata" in error;
}

// The reason of a refusal; empty where the transport broke.
function reasonOf(error: unknown): string {
  return isRefusal(error) ? String(error.metadata.get("ayni-reason")[0] ?? "") : "";
}

function describe(error: unknown): string {
  if (reasonOf(error) && isRefusal(error)) return `${reasonOf(error)}: ${error.details}`;
  return error instanceof Error ? error.message : String(error);
}

function fail(error: unknown): never {
  console.error(describe(error).split("\n")[0]);
  process.exit(1);
}

async function join(coordinator: Coordinator, name: string): Promise<JoinResponse> {
  const { stub } = coordinator;
  coordinator.metadata.setOptions({ waitForReady: true });
  const { protocolVersion } = await coordinator.call(stub.getRun, GetRunRequest.fromPartial({}), CALL);
  coordinator.metadata.setOptions({});
  check(protocolVersion === 1, "the coordinator speaks another version of the protocol than 1");
  const request = JoinRequest.fromPartial({
    protocolVersion,
    workerName: name,
    joinNonce: randomBytes(16).toString("hex"),
    backend: "cpu",
    wireTypes: [DType.DTYPE_FLOAT32],
    numTrainingSamples: BigInt(SAMPLES),
    taskFingerprint: sha256("ayni example: least squares 1"),
    taskSummary: "least squares of the example clients",
  });
  const answer = await coordinator.call(stub.join, request, CALL);
  check(answer.wireType === DType.DTYPE_FLOAT32, "this example sends float32 only; set the run's wire_type");
  check(answer.topology === "star", "this example contributes to the coordinator only; set topology: star");
  coordinator.metadata.set("ayni-session", answer.session);
  console.error(`joined run ${answer.runId} as worker ${answer.workerId}`);
  return answer;
}

async function main(): Promise<void> {
  const text = { type: "string" } as const;
  const { values } = parseArgs({ options: { coordinator: text, "token-file": text, name: text, ca: text } });
  const { coordinator: address, "token-file": tokenFile, name, ca } = values;
  if (!address || !tokenFile || !name) throw new Error("--coordinator, --token-file and --name are needed");
  const secure = ca ? credentials.createSsl(readFileSync(ca)) : credentials.createInsecure();
  const stub = new CoordinatorServiceClient(address, secure);
  const coordinator = new Coordinator(stub, readFileSync(tokenFile, "utf8").trim());
  const result = await new Worker(coordinator, await join(coordinator, name)).run();
  console.log(JSON.stringify({ language: "typescript-grpc", worker: name, ...result }));
  stub.close();
}

main().catch(fail);
