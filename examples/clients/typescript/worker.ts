// A worker of the least-squares example, over connect-es: joins a coordinator, contributes gradients, takes the means,
// steps. Numbers of JavaScript are binary64. A sum, difference or product of two float32 values that is made in
// binary64 and then rounded to float32 (Math.fround, or a store into a Float32Array) is the float32 result.

import { create } from "@bufbuild/protobuf";
import { type Duration, durationMs } from "@bufbuild/protobuf/wkt";
import { type Client, ConnectError, createClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { createHash, randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import {
  type Assignment,
  type CommitStepResponse,
  CoordinatorService,
  type GradientRequest,
  GradientRequestSchema,
  type GradientResponse,
  type JoinResponse,
  type MicrobatchStats,
  MicrobatchStatsSchema,
  type RoundAccepted,
  type Shutdown,
  StepKind,
} from "./gen/ayni/v1/coordinator_pb.js";
import { DType } from "./gen/ayni/v1/tensor_pb.js";

const FEATURES = 20000;
const SAMPLES = 96;
const ENTRIES = 8;
const CALL = { timeoutMs: 30_000 };
const STEP = { timeoutMs: 120_000 };
const RUN = { timeoutMs: 600_000 };
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
    return create(MicrobatchStatsSchema, { microbatch, weight: BigInt(weight), lossSum });
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

// One membership.
class Worker {
  private readonly model = new LeastSquares();
  private readonly losses: number[] = [];
  private at = { epoch: 0n, step: -1n };

  constructor(
    private readonly client: Client<typeof CoordinatorService>,
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
        await this.client.heartbeat({ workerId, ...this.at, activity: "computing" }, { timeoutMs: lease });
        answered = performance.now();
      } catch (error) {
        if (reasonOf(error) || performance.now() - answered > lease) fail(error);
      }
    };
    return setInterval(beat, interval);
  }

  // Takes assignments until the run is over.
  private async train(): Promise<Shutdown> {
    const request = { workerId: this.membership.workerId, parametersSha256: this.model.digest() };
    for await (const { frame } of this.client.shardAssignment(request, RUN)) {
      // The other frames are for elastic workers.
      if (frame.case === "assignment") await this.attempt(frame.value);
      if (frame.case === "waiting") console.error(frame.value.reason);
      if (frame.case === "shutdown") return frame.value;
    }
    throw new Error("the coordinator ended the assignments without saying that the run is over");
  }

  private async attempt(lease: Assignment): Promise<void> {
    check(lease.kind === StepKind.TRAIN, "this example does not evaluate");
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
  private async reduce(lease: Assignment, shard: Shard): Promise<Float32Array> {
    let accept: (answer?: RoundAccepted) => void = () => {};
    const accepted = new Promise<RoundAccepted | undefined>((resolve) => (accept = resolve));
    try {
      return await receive(this.client.gradient(this.contribution(lease, shard, accepted), STEP), accept);
    } finally {
      accept(undefined);
    }
  }

  private async *contribution(
    lease: Assignment,
    { microbatches, parts }: Shard,
    accepted: Promise<RoundAccepted | undefined>,
  ): AsyncGenerator<GradientRequest> {
    const tensor = { dtype: DType.DTYPE_FLOAT32, numElements: BigInt(FEATURES) };
    const round = { ...this.names(lease), tensor, microbatches, numBuckets: 1 };
    yield create(GradientRequestSchema, { frame: { case: "begin", value: { round } } });
    const answer = await accepted;
    if (!answer || answer.alreadyHeld) return;
    for (const [part, sum] of parts.entries()) {
      if (sum) yield* chunks(part, bytes(sum), answer.chunkBytes);
    }
  }

  private commit(lease: Assignment, { microbatches }: Shard): Promise<CommitStepResponse> {
    const request = { ...this.names(lease), kind: lease.kind, numBuckets: 1, microbatches };
    return this.client.commitStep({ ...request, parametersSha256: this.model.digest() }, STEP);
  }

  private names({ epoch, step, attempt, leaseId }: Assignment) {
    return { workerId: this.membership.workerId, epoch, step, attempt, leaseId };
  }

  private async leave(reason: string): Promise<void> {
    const request = { workerId: this.membership.workerId, reason, parametersSha256: this.model.digest() };
    try {
      await this.client.leave(request, { timeoutMs: 10_000 });
    } catch (error) {
      console.error(`the coordinator did not hear the goodbye: ${describe(error)}`);
    }
  }
}

// Every chunk but the last one has exactly the length that the coordinator named.
function* chunks(part: number, data: Uint8Array, chunkBytes: number): Generator<GradientRequest> {
  for (let offset = 0; offset < data.length; offset += chunkBytes) {
    const value = { offsetBytes: BigInt(offset), part, data: data.subarray(offset, offset + chunkBytes) };
    yield create(GradientRequestSchema, { frame: { case: "chunk", value } });
  }
}

async function receive(
  responses: AsyncIterable<GradientResponse>,
  accept: (answer: RoundAccepted) => void,
): Promise<Float32Array> {
  const mean = new Uint8Array(4 * FEATURES);
  let [received, complete] = [0, false];
  for await (const { frame } of responses) {
    if (frame.case === "accepted") accept(frame.value);
    if (frame.case === "complete") complete = true;
    if (frame.case !== "chunk") continue;
    const { offsetBytes, data } = frame.value;
    check(Number(offsetBytes) === received && received + data.length <= mean.length, "a chunk is out of place");
    mean.set(data, received);
    received += data.length;
  }
  // Where nothing has weight there is no mean, and no update.
  check(complete && (received === 0 || received === mean.length), "the mean came without its end");
  const view = new DataView(mean.buffer);
  return Float32Array.from({ length: FEATURES }, (_, i) => view.getFloat32(4 * i, true));
}

function bytes(values: Float32Array): Uint8Array {
  const view = new DataView(new ArrayBuffer(4 * values.length));
  values.forEach((value, i) => view.setFloat32(4 * i, value, true));
  return new Uint8Array(view.buffer);
}

function sha256(data: Uint8Array | string): string {
  return createHash("sha256").update(data).digest("hex");
}

function millis(duration: Duration | undefined): number {
  return duration ? durationMs(duration) : 1000;
}

function check(holds: boolean, sentence: string): void {
  if (!holds) throw new Error(sentence);
}

// The reason of a refusal; empty where the transport broke.
function reasonOf(error: unknown): string {
  return error instanceof ConnectError ? (error.metadata.get("ayni-reason") ?? "") : "";
}

function describe(error: unknown): string {
  if (!(error instanceof ConnectError)) return error instanceof Error ? error.message : String(error);
  return reasonOf(error) ? `${reasonOf(error)}: ${error.rawMessage}` : error.message;
}

function fail(error: unknown): never {
  console.error(describe(error).split("\n")[0]);
  process.exit(1);
}

async function join(client: Client<typeof CoordinatorService>, name: string): Promise<JoinResponse> {
  const { protocolVersion } = await client.getRun({}, CALL);
  check(protocolVersion === 1, "the coordinator speaks another version of the protocol than 1");
  const request = {
    protocolVersion,
    workerName: name,
    joinNonce: randomBytes(16).toString("hex"),
    backend: "cpu",
    wireTypes: [DType.DTYPE_FLOAT32],
    numTrainingSamples: BigInt(SAMPLES),
    taskFingerprint: sha256("ayni example: least squares 1"),
    taskSummary: "least squares of the example clients",
  };
  const answer = await client.join(request, CALL);
  check(answer.wireType === DType.DTYPE_FLOAT32, "this example sends float32 only; set the run's wire_type");
  check(answer.topology === "star", "this example contributes to the coordinator only; set topology: star");
  console.error(`joined run ${answer.runId} as worker ${answer.workerId}`);
  return answer;
}

async function main(): Promise<void> {
  const text = { type: "string" } as const;
  const { values } = parseArgs({ options: { coordinator: text, "token-file": text, name: text, ca: text } });
  const { coordinator, "token-file": tokenFile, name, ca } = values;
  if (!coordinator || !tokenFile || !name) throw new Error("--coordinator, --token-file and --name are needed");
  const headers = new Map([["authorization", `Bearer ${readFileSync(tokenFile, "utf8").trim()}`]]);
  const withHeaders: Interceptor = (next) => (request) => {
    headers.forEach((value, key) => request.header.set(key, value));
    return next(request);
  };
  const transport = createGrpcTransport({
    baseUrl: `${ca ? "https" : "http"}://${coordinator}`,
    interceptors: [withHeaders],
    ...(ca ? { nodeOptions: { ca: readFileSync(ca) } } : {}),
  });
  const client = createClient(CoordinatorService, transport);
  const membership = await join(client, name);
  headers.set("ayni-session", membership.session);
  const result = await new Worker(client, membership).run();
  console.log(JSON.stringify({ language: "typescript", worker: name, ...result }));
  process.exit(0);
}

main().catch(fail);
