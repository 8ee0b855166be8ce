import ayni.v1.*;
import com.google.protobuf.ByteString;
import com.google.protobuf.Duration;
import com.google.protobuf.UnsafeByteOperations;
import io.grpc.*;
import io.grpc.stub.*;
import java.io.*;
import java.nio.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.*;
import java.util.*;
import java.util.concurrent.*;

/** A worker of the least-squares example: joins a coordinator, contributes gradients, takes the means, steps. */
public final class Worker {
  private static final Metadata.Key<String> REASON = key("ayni-reason");
  /** After these nothing of the attempt counts, and another assignment comes. */
  private static final Set<String> VOID = Set.of("STEP_VOIDED", "STALE_STEP", "STALE_EPOCH");

  private static final long CALL_SECONDS = 30;
  private static final long STEP_SECONDS = 120;
  private static final long RUN_SECONDS = 600;

  private final CoordinatorServiceGrpc.CoordinatorServiceBlockingStub calls;
  private final CoordinatorServiceGrpc.CoordinatorServiceStub streams;
  private final JoinResponse membership;
  private final LeastSquares model = new LeastSquares();
  private volatile long epoch = 0;
  private volatile long step = -1;
  /** One for each update that the parameters have had. */
  private final List<Double> losses = new ArrayList<>();

  private Worker(ManagedChannel channel, JoinResponse membership, Metadata headers) {
    headers.put(key("ayni-session"), membership.getSession());
    var interceptor = MetadataUtils.newAttachHeadersInterceptor(headers);
    this.calls = CoordinatorServiceGrpc.newBlockingStub(channel).withInterceptors(interceptor);
    this.streams = CoordinatorServiceGrpc.newStub(channel).withInterceptors(interceptor);
    this.membership = membership;
  }

  public static void main(String[] arguments) {
    try {
      run(flags(arguments));
    } catch (Failure | IOException | StatusRuntimeException | InterruptedException error) {
      fail(error);
    }
    System.exit(0);
  }

  private static void run(Map<String, String> flags) throws IOException, InterruptedException {
    var headers = new Metadata();
    String token = Files.readString(Path.of(flags.get("--token-file"))).strip();
    headers.put(key("authorization"), "Bearer " + token);
    String name = flags.get("--name");
    ManagedChannel channel = open(flags.get("--coordinator"), flags.get("--ca"));
    JoinResponse membership = join(channel, name, headers);
    log("joined run %s as worker %d", membership.getRunId(), membership.getWorkerId());
    var worker = new Worker(channel, membership, headers);
    var heartbeats = worker.startHeartbeats();
    String reason = "it failed";
    try {
      Shutdown end = worker.train();
      reason = "the run is over";
      worker.report(name, end);
    } finally {
      worker.leave(reason);
      heartbeats.shutdownNow();
      channel.shutdownNow().awaitTermination(CALL_SECONDS, TimeUnit.SECONDS);
    }
  }

  private static Map<String, String> flags(String[] arguments) {
    var flags = new HashMap<String, String>();
    for (int i = 0; i + 1 < arguments.length; i += 2) {
      flags.put(arguments[i], arguments[i + 1]);
    }
    if (arguments.length % 2 != 0 || !flags.keySet().containsAll(Set.of("--coordinator", "--token-file", "--name"))) {
      throw new Failure("usage: worker --coordinator HOST:PORT --token-file FILE --name NAME [--ca FILE]");
    }
    return flags;
  }

  private static ManagedChannel open(String address, String ca) throws IOException {
    ChannelCredentials plain = InsecureChannelCredentials.create();
    try {
      var secure = ca == null ? plain : TlsChannelCredentials.newBuilder().trustManager(new File(ca)).build();
      return Grpc.newChannelBuilder(address, secure).build();
    } catch (UnsupportedOperationException error) {
      throw new Failure("this netty has no TLS; take grpc-netty-shaded in its place: " + error.getMessage());
    }
  }

  private static JoinResponse join(ManagedChannel channel, String name, Metadata headers) {
    var stub = CoordinatorServiceGrpc.newBlockingStub(channel)
        .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
    var run = stub.withWaitForReady().withDeadlineAfter(CALL_SECONDS, TimeUnit.SECONDS)
        .getRun(GetRunRequest.getDefaultInstance());
    check(run.getProtocolVersion() == 1, "the coordinator speaks another version of the protocol than 1");
    byte[] nonce = new byte[16];
    new SecureRandom().nextBytes(nonce);
    JoinRequest request = JoinRequest.newBuilder()
        .setProtocolVersion(1)
        .setWorkerName(name)
        .setJoinNonce(HexFormat.of().formatHex(nonce))
        .setBackend("cpu")
        .addWireTypes(DType.DTYPE_FLOAT32)
        .setNumTrainingSamples(LeastSquares.SAMPLES)
        .setTaskFingerprint(sha256("ayni example: least squares 1".getBytes(StandardCharsets.US_ASCII)))
        .setTaskSummary("least squares of the example clients")
        .build();
    JoinResponse answer = stub.withDeadlineAfter(CALL_SECONDS, TimeUnit.SECONDS).join(request);
    check(answer.getWireType() == DType.DTYPE_FLOAT32, "this example sends float32 only; set the run's wire_type");
    check(answer.getTopology().equals("star"), "this example contributes to the coordinator only; set topology: star");
    return answer;
  }

  /** Says that the worker is alive, beside everything else, for as long as it is a member. */
  private ScheduledExecutorService startHeartbeats() {
    var timer = Executors.newSingleThreadScheduledExecutor(task -> {
      var thread = new Thread(task, "heartbeats");
      thread.setDaemon(true);
      return thread;
    });
    long interval = millis(membership.getHeartbeatInterval());
    long[] answered = {System.nanoTime()};
    timer.scheduleAtFixedRate(() -> heartbeat(answered), interval, interval, TimeUnit.MILLISECONDS);
    return timer;
  }

  /** A broken transport may pass, within a lease; a refusal is final. */
  private void heartbeat(long[] answered) {
    long lease = millis(membership.getLease());
    var request = HeartbeatRequest.newBuilder().setWorkerId(membership.getWorkerId())
        .setEpoch(epoch).setStep(step).setActivity("computing").build();
    try {
      calls.withDeadlineAfter(lease, TimeUnit.MILLISECONDS).heartbeat(request);
      answered[0] = System.nanoTime();
    } catch (StatusRuntimeException error) {
      boolean expired = System.nanoTime() - answered[0] > TimeUnit.MILLISECONDS.toNanos(lease);
      if (!Thread.currentThread().isInterrupted() && (expired || !reason(error).isEmpty())) {
        fail(error);
      }
    }
  }

  /** Takes assignments until the run is over. */
  private Shutdown train() throws InterruptedException {
    var request = ShardAssignmentRequest.newBuilder()
        .setWorkerId(membership.getWorkerId()).setParametersSha256(model.hash()).build();
    Iterator<ShardAssignmentResponse> frames =
        calls.withDeadlineAfter(RUN_SECONDS, TimeUnit.SECONDS).shardAssignment(request);
    while (frames.hasNext()) {
      ShardAssignmentResponse frame = frames.next();
      switch (frame.getFrameCase()) {
        case ASSIGNMENT -> attempt(frame.getAssignment());
        case WAITING -> log("%s", frame.getWaiting().getReason());
        case SHUTDOWN -> {
          return frame.getShutdown();
        }
        default -> { } // The others are for elastic workers.
      }
    }
    throw new Failure("the coordinator ended the assignments without saying that the run is over");
  }

  private void attempt(Assignment assignment) throws InterruptedException {
    check(assignment.getKind() == StepKind.STEP_KIND_TRAIN, "this example does not evaluate");
    check(assignment.getStep() == losses.size(), "this worker has missed a commit");
    epoch = assignment.getEpoch();
    step = assignment.getStep();
    try {
      Shard shard = model.compute(assignment);
      float[] mean = reduce(assignment, shard);
      CommitStepResponse commit = commit(assignment, shard);
      model.update(mean, commit);
      losses.add(commit.getGlobalLoss());
    } catch (StatusRuntimeException error) {
      if (!VOID.contains(reason(error))) {
        throw error;
      }
      log("attempt %d of step %d is void: %s", assignment.getAttempt(), step, describe(error));
    }
  }

  /** Contributes the shard's sums and returns the mean, which may begin to come before the last sum has left. */
  private float[] reduce(Assignment assignment, Shard shard) throws InterruptedException {
    var answers = new Answers();
    var requests = streams.withDeadlineAfter(STEP_SECONDS, TimeUnit.SECONDS).gradient(answers);
    var begin = GradientBegin.newBuilder().setRound(begin(assignment, shard));
    requests.onNext(GradientRequest.newBuilder().setBegin(begin).build());
    GradientResponse first = answers.next();
    check(first.hasAccepted(), "a gradient stream did not begin with `accepted`");
    var accepted = first.getAccepted();
    for (int part = 0; part < shard.parts().size() && !accepted.getAlreadyHeld(); part++) {
      if (shard.parts().get(part) != null) {
        send(requests, part, bytes(shard.parts().get(part)), accepted.getChunkBytes());
      }
    }
    requests.onCompleted();
    return receive(answers);
  }

  /** Takes chunks in order until the mean is complete. Where nothing has weight there is none. */
  private static float[] receive(Answers answers) throws InterruptedException {
    var mean = ByteBuffer.allocate(4 * LeastSquares.FEATURES).order(ByteOrder.LITTLE_ENDIAN);
    GradientResponse frame = answers.next();
    for (; frame.getFrameCase() == GradientResponse.FrameCase.CHUNK; frame = answers.next()) {
      Chunk chunk = frame.getChunk();
      check(
          chunk.getOffsetBytes() == mean.position() && chunk.getData().size() <= mean.remaining(),
          "a chunk of the mean is out of place");
      chunk.getData().copyTo(mean);
    }
    check(frame.hasComplete() && (mean.position() == 0 || !mean.hasRemaining()), "the mean came without its end");
    var values = new float[LeastSquares.FEATURES];
    mean.rewind().asFloatBuffer().get(values);
    return values;
  }

  private RoundBegin begin(Assignment assignment, Shard shard) {
    return RoundBegin.newBuilder()
        .setWorkerId(membership.getWorkerId()).setEpoch(assignment.getEpoch()).setStep(assignment.getStep())
        .setAttempt(assignment.getAttempt()).setLeaseId(assignment.getLeaseId())
        .setTensor(TensorSpec.newBuilder().setDtype(DType.DTYPE_FLOAT32).setNumElements(LeastSquares.FEATURES))
        .addAllMicrobatches(shard.microbatches())
        .setNumBuckets(1)
        .build();
  }

  /** Every chunk but the last one has exactly the length that the coordinator named. */
  private static void send(StreamObserver<GradientRequest> requests, int part, ByteString data, int chunkBytes) {
    for (int offset = 0; offset < data.size(); offset += chunkBytes) {
      var chunk = Chunk.newBuilder().setOffsetBytes(offset).setPart(part)
          .setData(data.substring(offset, Math.min(offset + chunkBytes, data.size())));
      requests.onNext(GradientRequest.newBuilder().setChunk(chunk).build());
    }
  }

  private CommitStepResponse commit(Assignment assignment, Shard shard) {
    var request = CommitStepRequest.newBuilder()
        .setWorkerId(membership.getWorkerId()).setEpoch(assignment.getEpoch()).setStep(assignment.getStep())
        .setAttempt(assignment.getAttempt()).setLeaseId(assignment.getLeaseId())
        .setKind(assignment.getKind())
        .setNumBuckets(1)
        .addAllMicrobatches(shard.microbatches())
        .setParametersSha256(model.hash())
        .build();
    return calls.withDeadlineAfter(STEP_SECONDS, TimeUnit.SECONDS).commitStep(request);
  }

  private void leave(String reason) {
    var request = LeaveRequest.newBuilder().setWorkerId(membership.getWorkerId())
        .setReason(reason).setParametersSha256(model.hash()).build();
    try {
      calls.withDeadlineAfter(10, TimeUnit.SECONDS).leave(request);
    } catch (StatusRuntimeException error) {
      log("the coordinator did not hear the goodbye: %s", describe(error));
    }
  }

  private void report(String name, Shutdown end) {
    log("the run is over: %s", end.getReason());
    check(end.getFinished(), "the run was stopped before its last step");
    System.out.printf("{\"language\": \"java\", \"worker\": %s, \"steps\": %d, \"parameters_sha256\": \"%s\", ",
        quoted(name), end.getCommittedSteps(), model.hash());
    double first = losses.get(0);
    double last = losses.get(losses.size() - 1);
    System.out.println("\"first_loss\": " + first + ", \"loss\": " + last + "}");
  }

  /** What the coordinator says on a gradient stream: frames, and then an error or nothing. */
  private static final class Answers implements StreamObserver<GradientResponse> {
    private final BlockingQueue<Object> received = new LinkedBlockingQueue<>();

    @Override
    public void onNext(GradientResponse frame) {
      received.add(frame);
    }

    @Override
    public void onError(Throwable error) {
      received.add(error);
    }

    @Override
    public void onCompleted() {
      received.add(new Failure("the coordinator ended a gradient stream too early"));
    }

    GradientResponse next() throws InterruptedException {
      Object answer = received.poll(STEP_SECONDS, TimeUnit.SECONDS);
      if (answer instanceof RuntimeException error) {
        throw error;
      }
      check(answer != null, "the coordinator did not answer on a gradient stream in time");
      return (GradientResponse) answer;
    }
  }

  /** What a lease contributes: statistics of each micro-batch, and a sum (null without weight) for each part. */
  private record Shard(List<MicrobatchStats> microbatches, List<float[]> parts) {}

  /** Micro-batches start to stop-1, all below one node of the canonical tree. */
  private record Node(int start, int stop) {
    static List<Node> cover(int start, int stop, int count) {
      var nodes = new ArrayList<Node>();
      while (start < stop) {
        int size = 1;
        while (start % (2 * size) == 0 && size < count && Math.min(start + 2 * size, count) <= stop) {
          size *= 2;
        }
        nodes.add(new Node(start, Math.min(start + size, count)));
        start = nodes.get(nodes.size() - 1).stop;
      }
      return nodes;
    }

    /** Returns the sum of the node's leaves, left plus right; null where none has weight. */
    float[] sum(float[][] leaves) {
      if (stop - start == 1) {
        return leaves[start];
      }
      int middle = start + Integer.highestOneBit(stop - start - 1);
      float[] left = new Node(start, middle).sum(leaves);
      float[] right = new Node(middle, stop).sum(leaves);
      if (left == null || right == null) {
        return left == null ? right : left;
      }
      for (int i = 0; i < left.length; i++) {
        left[i] += right[i];
      }
      return left;
    }
  }

  /** The model: sparse weighted least squares over samples that formulas make. Java's float is binary32, always. */
  private static final class LeastSquares {
    static final int FEATURES = 20000;
    static final int SAMPLES = 96;
    static final int ENTRIES = 8;

    private final float[] parameters = new float[FEATURES];

    String hash() {
      return sha256(bytes(parameters).toByteArray());
    }

    Shard compute(Assignment lease) {
      var stats = new ArrayList<MicrobatchStats>();
      var leaves = new float[lease.getNumMicrobatches()][];
      for (int m = lease.getMicrobatchStart(); m < lease.getMicrobatchStop(); m++) {
        var gradient = new float[FEATURES];
        MicrobatchStats sums = differentiate(lease, m, gradient);
        leaves[m] = sums.getWeight() == 0 ? null : gradient;
        stats.add(sums);
      }
      var nodes = Node.cover(lease.getMicrobatchStart(), lease.getMicrobatchStop(), lease.getNumMicrobatches());
      var parts = new ArrayList<float[]>();
      nodes.forEach(node -> parts.add(node.sum(leaves)));
      return new Shard(stats, parts);
    }

    /** Adds one micro-batch's gradient, and returns its weight and loss. */
    private MicrobatchStats differentiate(Assignment lease, int m, float[] gradient) {
      long weight = 0;
      double loss = 0;
      for (long position = edge(lease, m); position < edge(lease, m + 1); position++) {
        int sample = (int) (position % SAMPLES);
        int w = sample / 8 % 4;
        float error = error(sample);
        float scaled = w * error;
        for (int k = 0; k < ENTRIES; k++) {
          gradient[feature(sample, k)] += scaled * value(sample, k);
        }
        weight += w;
        loss += (double) w * error * error / 2;
      }
      return MicrobatchStats.newBuilder().setMicrobatch(m).setWeight(weight).setLossSum(loss).build();
    }

    private static long edge(Assignment lease, int m) {
      return lease.getPosition() + m * lease.getNumSamples() / lease.getNumMicrobatches();
    }

    private float error(int sample) {
      float prediction = 0;
      for (int k = 0; k < ENTRIES; k++) {
        prediction += parameters[feature(sample, k)] * value(sample, k);
      }
      return prediction - (sample * 37 % 101 - 50);
    }

    private static int feature(int sample, int k) {
      return (sample * 199 + k * 5970) % FEATURES;
    }

    private static int value(int sample, int k) {
      return (sample * 7 + k * 13) % 17 - 8;
    }

    void update(float[] mean, CommitStepResponse commit) {
      float rate = (float) commit.getLearningRate();
      float clip = (float) commit.getClipFactor();
      for (int i = 0; i < FEATURES && commit.getTotalWeight() > 0; i++) {
        parameters[i] -= rate * (clip * mean[i]);
      }
    }
  }

  /** A sentence about why the worker can't go on. */
  private static final class Failure extends RuntimeException {
    Failure(String sentence) {
      super(sentence);
    }
  }

  private static void check(boolean holds, String sentence) {
    if (!holds) {
      throw new Failure(sentence);
    }
  }

  private static ByteString bytes(float[] values) {
    var buffer = ByteBuffer.allocate(4 * values.length).order(ByteOrder.LITTLE_ENDIAN);
    buffer.asFloatBuffer().put(values);
    return UnsafeByteOperations.unsafeWrap(buffer);
  }

  private static String sha256(byte[] data) {
    try {
      return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(data));
    } catch (NoSuchAlgorithmException error) {
      throw new AssertionError(error); // Every Java has it.
    }
  }

  /** Returns the reason of a refusal; empty where the transport broke. */
  private static String reason(StatusRuntimeException error) {
    Metadata trailers = error.getTrailers();
    return trailers != null && trailers.containsKey(REASON) ? trailers.get(REASON) : "";
  }

  private static String describe(StatusRuntimeException error) {
    Status status = error.getStatus();
    String name = reason(error).isEmpty() ? status.getCode().toString() : reason(error);
    return name + ": " + status.getDescription();
  }

  private static String quoted(String text) {
    return '"' + text.replace("\\", "\\\\").replace("\"", "\\\"") + '"';
  }

  private static Metadata.Key<String> key(String name) {
    return Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER);
  }

  private static long millis(Duration duration) {
    return duration.getSeconds() * 1000 + duration.getNanos() / 1_000_000;
  }

  private static void log(String format, Object... values) {
    System.err.println(String.format(format, values));
  }

  private static void fail(Exception error) {
    System.err.println(error instanceof StatusRuntimeException status ? describe(status) : error.getMessage());
    System.exit(1);
  }
}
