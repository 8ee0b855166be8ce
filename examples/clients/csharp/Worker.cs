// A worker of the least-squares example: joins a coordinator, contributes gradients, takes the means, steps.

using System;
using System.Buffers.Binary;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Linq;
using System.Net.Http;
using System.Net.Security;
using System.Security.Cryptography;
using System.Security.Cryptography.X509Certificates;
using System.Text;
using System.Text.Json;
using System.Threading;
using System.Threading.Tasks;
using Ayni.V1;
using Google.Protobuf;
using Grpc.Core;
using Grpc.Net.Client;

// A sentence about why the worker can't go on.
internal sealed class WorkerException : Exception
{
    public WorkerException(string sentence)
        : base(sentence)
    {
    }
}

// What a lease contributes: statistics of each micro-batch, and a sum (null without weight) for each part.
internal sealed class Shard
{
    public List<MicrobatchStats> Microbatches = new List<MicrobatchStats>();
    public List<float[]> Parts = new List<float[]>();
}

// The canonical tree over a step's micro-batches.
internal static class Tree
{
    // Returns the fewest nodes that make up [start, stop), left to right.
    public static IEnumerable<(int Start, int Stop)> Cover(int start, int stop, int count)
    {
        while (start < stop)
        {
            int size = 1;
            while (start % (2 * size) == 0 && size < count && Math.Min(start + 2 * size, count) <= stop)
            {
                size *= 2;
            }
            int end = Math.Min(start + size, count);
            yield return (start, end);
            start = end;
        }
    }

    // Returns the sum of a node's leaves, left plus right; null where none has weight.
    public static float[] Sum(float[][] leaves, int start, int stop)
    {
        if (stop - start == 1)
        {
            return leaves[start];
        }
        int half = 1;
        while (2 * half < stop - start)
        {
            half *= 2;
        }
        float[] left = Sum(leaves, start, start + half);
        float[] right = Sum(leaves, start + half, stop);
        if (left == null || right == null)
        {
            return left ?? right;
        }
        for (int i = 0; i < left.Length; i++)
        {
            left[i] = (float)(left[i] + right[i]);
        }
        return left;
    }
}

// Sparse weighted least squares over samples that formulas make. The casts say that every result is rounded to
// binary32: without them the language allows more.
internal sealed class LeastSquares
{
    public const int Features = 20000;
    public const int Samples = 96;
    public const int Entries = 8;

    private readonly float[] parameters = new float[Features];

    public string Digest()
    {
        return Bytes.Sha256(Bytes.Of(parameters));
    }

    public Shard Compute(Assignment lease)
    {
        var shard = new Shard();
        var leaves = new float[lease.NumMicrobatches][];
        for (int m = (int)lease.MicrobatchStart; m < lease.MicrobatchStop; m++)
        {
            var gradient = new float[Features];
            MicrobatchStats stats = Differentiate(lease, m, gradient);
            leaves[m] = stats.Weight == 0 ? null : gradient;
            shard.Microbatches.Add(stats);
        }
        var nodes = Tree.Cover((int)lease.MicrobatchStart, (int)lease.MicrobatchStop, (int)lease.NumMicrobatches);
        shard.Parts.AddRange(nodes.Select(node => Tree.Sum(leaves, node.Start, node.Stop)));
        return shard;
    }

    public void Update(float[] mean, CommitStepResponse commit)
    {
        float rate = (float)commit.LearningRate;
        float clip = (float)commit.ClipFactor;
        for (int i = 0; i < Features && commit.TotalWeight > 0; i++)
        {
            float clipped = (float)(clip * mean[i]);
            float change = (float)(rate * clipped);
            parameters[i] = (float)(parameters[i] - change);
        }
    }

    // Adds one micro-batch's gradient, and returns its weight and loss.
    private MicrobatchStats Differentiate(Assignment lease, int microbatch, float[] gradient)
    {
        long total = 0;
        double loss = 0;
        for (long position = Edge(lease, microbatch); position < Edge(lease, microbatch + 1); position++)
        {
            int sample = (int)(position % Samples);
            int weight = sample / 8 % 4;
            float error = Error(sample);
            float scaled = (float)(weight * error);
            for (int k = 0; k < Entries; k++)
            {
                float product = (float)(scaled * Value(sample, k));
                gradient[Feature(sample, k)] = (float)(gradient[Feature(sample, k)] + product);
            }
            total += weight;
            loss += (double)weight * (double)error * (double)error / 2;
        }
        return new MicrobatchStats { Microbatch = (uint)microbatch, Weight = total, LossSum = loss };
    }

    private float Error(int sample)
    {
        float prediction = 0;
        for (int k = 0; k < Entries; k++)
        {
            float product = (float)(parameters[Feature(sample, k)] * Value(sample, k));
            prediction = (float)(prediction + product);
        }
        return (float)(prediction - (sample * 37 % 101 - 50));
    }

    private static long Edge(Assignment lease, int microbatch)
    {
        return lease.Position + microbatch * lease.NumSamples / lease.NumMicrobatches;
    }

    private static int Feature(int sample, int k)
    {
        return (sample * 199 + k * 5970) % Features;
    }

    private static float Value(int sample, int k)
    {
        return (sample * 7 + k * 13) % 17 - 8;
    }
}

// One membership.
internal sealed class Worker
{
    private static readonly TimeSpan CallTime = TimeSpan.FromSeconds(30);
    private static readonly TimeSpan StepTime = TimeSpan.FromSeconds(120);
    private static readonly TimeSpan RunTime = TimeSpan.FromSeconds(600);

    // After these nothing of the attempt counts, and another assignment comes.
    private static readonly string[] Void = { "STEP_VOIDED", "STALE_STEP", "STALE_EPOCH" };

    private readonly CoordinatorService.CoordinatorServiceClient client;
    private readonly Metadata headers;
    private readonly string name;
    private readonly LeastSquares model = new LeastSquares();
    private readonly List<double> losses = new List<double>();
    private JoinResponse membership;
    private long epoch;
    private long step = -1;

    private Worker(CoordinatorService.CoordinatorServiceClient client, Metadata headers, string name)
    {
        this.client = client;
        this.headers = headers;
        this.name = name;
    }

    public static async Task<int> Main(string[] arguments)
    {
        try
        {
            Dictionary<string, string> flags = Flags(arguments);
            string token = File.ReadAllText(flags["--token-file"]).Trim();
            var headers = new Metadata { { "authorization", "Bearer " + token } };
            using (GrpcChannel channel = Open(flags["--coordinator"], flags.GetValueOrDefault("--ca")))
            {
                var client = new CoordinatorService.CoordinatorServiceClient(channel);
                Console.WriteLine(await new Worker(client, headers, flags["--name"]).Run());
            }
            return 0;
        }
        catch (Exception error) when (error is RpcException || error is IOException || error is WorkerException)
        {
            Console.Error.WriteLine(Describe(error));
            return 1;
        }
    }

    private static Dictionary<string, string> Flags(string[] arguments)
    {
        var flags = new Dictionary<string, string>();
        for (int i = 0; i + 1 < arguments.Length; i += 2)
        {
            flags[arguments[i]] = arguments[i + 1];
        }
        bool whole = new[] { "--coordinator", "--token-file", "--name" }.All(flags.ContainsKey);
        Check(whole, "usage: worker --coordinator HOST:PORT --token-file FILE --name NAME [--ca FILE]");
        return flags;
    }

    private static GrpcChannel Open(string address, string ca)
    {
        var handler = new SocketsHttpHandler();
        if (ca == null)
        {
            return GrpcChannel.ForAddress("http://" + address, new GrpcChannelOptions { HttpHandler = handler });
        }
        var policy = new X509ChainPolicy
        {
            TrustMode = X509ChainTrustMode.CustomRootTrust,
            RevocationMode = X509RevocationMode.NoCheck,
        };
        policy.CustomTrustStore.ImportFromPemFile(ca);
        handler.SslOptions = new SslClientAuthenticationOptions { CertificateChainPolicy = policy };
        return GrpcChannel.ForAddress("https://" + address, new GrpcChannelOptions { HttpHandler = handler });
    }

    private CallOptions Within(TimeSpan time)
    {
        return new CallOptions(headers, DateTime.UtcNow + time);
    }

    private async Task<string> Run()
    {
        await Join();
        using (var over = new CancellationTokenSource())
        {
            Task heartbeats = Beat(over.Token);
            string reason = "it failed";
            try
            {
                Shutdown end = await Train();
                reason = "the run is over";
                return Report(end);
            }
            finally
            {
                over.Cancel();
                await heartbeats;
                await Leave(reason);
            }
        }
    }

    private async Task Join()
    {
        GetRunResponse run = await client.GetRunAsync(new GetRunRequest(), Within(CallTime).WithWaitForReady());
        Check(run.ProtocolVersion == 1, "the coordinator speaks another version of the protocol than 1");
        var request = new JoinRequest
        {
            ProtocolVersion = 1,
            WorkerName = name,
            JoinNonce = Bytes.Hex(RandomNumberGenerator.GetBytes(16)),
            Backend = "cpu",
            NumTrainingSamples = LeastSquares.Samples,
            TaskFingerprint = Bytes.Sha256(Encoding.ASCII.GetBytes("ayni example: least squares 1")),
            TaskSummary = "least squares of the example clients",
        };
        request.WireTypes.Add(DType.Float32);
        membership = await client.JoinAsync(request, Within(CallTime));
        Check(membership.WireType == DType.Float32, "this example sends float32 only; set the run's wire_type");
        Check(membership.Topology == "star", "this example contributes to the coordinator only; set topology: star");
        headers.Add("ayni-session", membership.Session);
        Console.Error.WriteLine($"joined run {membership.RunId} as worker {membership.WorkerId}");
    }

    // Says that the worker is alive, beside everything else. A broken transport may pass, within a lease.
    private async Task Beat(CancellationToken over)
    {
        TimeSpan lease = membership.Lease.ToTimeSpan();
        Stopwatch answered = Stopwatch.StartNew();
        while (!over.IsCancellationRequested)
        {
            try
            {
                await Task.Delay(membership.HeartbeatInterval.ToTimeSpan(), over);
                var request = new HeartbeatRequest { WorkerId = membership.WorkerId, Activity = "computing" };
                request.Epoch = Interlocked.Read(ref epoch);
                request.Step = Interlocked.Read(ref step);
                await client.HeartbeatAsync(request, Within(lease));
                answered.Restart();
            }
            catch (OperationCanceledException)
            {
                return;
            }
            catch (RpcException error)
            {
                if (ReasonOf(error) != "" || answered.Elapsed > lease)
                {
                    Console.Error.WriteLine(Describe(error));
                    Environment.Exit(1);
                }
            }
        }
    }

    // Takes assignments until the run is over.
    private async Task<Shutdown> Train()
    {
        var request = new ShardAssignmentRequest
        {
            WorkerId = membership.WorkerId,
            ParametersSha256 = model.Digest(),
        };
        using (var call = client.ShardAssignment(request, Within(RunTime)))
        {
            while (await call.ResponseStream.MoveNext(CancellationToken.None))
            {
                ShardAssignmentResponse frame = call.ResponseStream.Current;
                switch (frame.FrameCase)
                {
                    case ShardAssignmentResponse.FrameOneofCase.Assignment:
                        await Attempt(frame.Assignment);
                        break;
                    case ShardAssignmentResponse.FrameOneofCase.Waiting:
                        Console.Error.WriteLine(frame.Waiting.Reason);
                        break;
                    case ShardAssignmentResponse.FrameOneofCase.Shutdown:
                        return frame.Shutdown;
                    default:
                        break; // The others are for elastic workers.
                }
            }
        }
        throw new WorkerException("the assignments ended without word that the run is over");
    }

    private async Task Attempt(Assignment lease)
    {
        Check(lease.Kind == StepKind.Train, "this example does not evaluate");
        Check(lease.Step == losses.Count, "this worker has missed a commit");
        Interlocked.Exchange(ref epoch, lease.Epoch);
        Interlocked.Exchange(ref step, lease.Step);
        try
        {
            Shard shard = model.Compute(lease);
            float[] mean = await Reduce(lease, shard);
            CommitStepResponse commit = await Commit(lease, shard);
            model.Update(mean, commit);
            losses.Add(commit.GlobalLoss);
        }
        catch (RpcException error) when (Void.Contains(ReasonOf(error)))
        {
            Console.Error.WriteLine($"attempt {lease.Attempt} of step {lease.Step} is void: {Describe(error)}");
        }
    }

    // Contributes the shard's sums and returns the mean, which may begin to come before the last sum has left.
    private async Task<float[]> Reduce(Assignment lease, Shard shard)
    {
        using (var call = client.Gradient(Within(StepTime)))
        {
            var begin = new GradientBegin { Round = Begin(lease, shard) };
            await call.RequestStream.WriteAsync(new GradientRequest { Begin = begin });
            bool answered = await call.ResponseStream.MoveNext(CancellationToken.None);
            RoundAccepted accepted = answered ? call.ResponseStream.Current.Accepted : null;
            Check(accepted != null, "a gradient stream did not begin with `accepted`");
            Task sending = Send(call.RequestStream, shard, accepted);
            try
            {
                return await Receive(call.ResponseStream);
            }
            finally
            {
                // A refusal ends both directions, and the one that is read says why.
                await sending.ContinueWith(_ => { });
            }
        }
    }

    private RoundBegin Begin(Assignment lease, Shard shard)
    {
        var begin = new RoundBegin
        {
            WorkerId = membership.WorkerId,
            Epoch = lease.Epoch,
            Step = lease.Step,
            Attempt = lease.Attempt,
            LeaseId = lease.LeaseId,
            Tensor = new TensorSpec { Dtype = DType.Float32, NumElements = LeastSquares.Features },
            NumBuckets = 1,
        };
        begin.Microbatches.AddRange(shard.Microbatches);
        return begin;
    }

    // Every chunk but a part's last one has exactly the length that the coordinator named.
    private static async Task Send(IClientStreamWriter<GradientRequest> requests, Shard shard, RoundAccepted accepted)
    {
        for (int part = 0; part < shard.Parts.Count && !accepted.AlreadyHeld; part++)
        {
            byte[] data = shard.Parts[part] == null ? Array.Empty<byte>() : Bytes.Of(shard.Parts[part]);
            for (int offset = 0; offset < data.Length; offset += (int)accepted.ChunkBytes)
            {
                int length = Math.Min((int)accepted.ChunkBytes, data.Length - offset);
                var chunk = new Chunk { OffsetBytes = (ulong)offset, Part = (uint)part };
                chunk.Data = ByteString.CopyFrom(data, offset, length);
                await requests.WriteAsync(new GradientRequest { Chunk = chunk });
            }
        }
        await requests.CompleteAsync();
    }

    private static async Task<float[]> Receive(IAsyncStreamReader<GradientResponse> responses)
    {
        var mean = new MemoryStream();
        bool complete = false;
        while (await responses.MoveNext(CancellationToken.None))
        {
            Chunk chunk = responses.Current.Chunk;
            complete = responses.Current.Complete != null;
            if (chunk != null)
            {
                bool fits = mean.Length + chunk.Data.Length <= 4 * LeastSquares.Features;
                Check(fits && chunk.OffsetBytes == (ulong)mean.Length, "a chunk of the mean is out of place");
                chunk.Data.WriteTo(mean);
            }
        }
        // Where nothing has weight there is no mean, and no update.
        bool whole = mean.Length == 0 || mean.Length == 4 * LeastSquares.Features;
        Check(complete && whole, "the mean came without its end");
        return Bytes.Parse(mean.ToArray());
    }

    private async Task<CommitStepResponse> Commit(Assignment lease, Shard shard)
    {
        var request = new CommitStepRequest
        {
            WorkerId = membership.WorkerId,
            Epoch = lease.Epoch,
            Step = lease.Step,
            Attempt = lease.Attempt,
            LeaseId = lease.LeaseId,
            Kind = lease.Kind,
            NumBuckets = 1,
            ParametersSha256 = model.Digest(),
        };
        request.Microbatches.AddRange(shard.Microbatches);
        return await client.CommitStepAsync(request, Within(StepTime));
    }

    private async Task Leave(string reason)
    {
        var request = new LeaveRequest
        {
            WorkerId = membership.WorkerId,
            Reason = reason,
            ParametersSha256 = model.Digest(),
        };
        try
        {
            await client.LeaveAsync(request, Within(TimeSpan.FromSeconds(10)));
        }
        catch (RpcException error)
        {
            Console.Error.WriteLine("the coordinator did not hear the goodbye: " + Describe(error));
        }
    }

    private string Report(Shutdown end)
    {
        Console.Error.WriteLine("the run is over: " + end.Reason);
        Check(end.Finished, "the run was stopped before its last step");
        return JsonSerializer.Serialize(new
        {
            language = "csharp",
            worker = name,
            steps = end.CommittedSteps,
            parameters_sha256 = model.Digest(),
            first_loss = losses[0],
            loss = losses[losses.Count - 1],
        });
    }

    private static void Check(bool holds, string sentence)
    {
        if (!holds)
        {
            throw new WorkerException(sentence);
        }
    }

    // Returns the reason of a refusal; empty where the transport broke.
    private static string ReasonOf(RpcException error)
    {
        return error.Trailers.GetValue("ayni-reason") ?? "";
    }

    private static string Describe(Exception error)
    {
        var status = error as RpcException;
        if (status == null)
        {
            return error.Message;
        }
        string reason = ReasonOf(status);
        return (reason == "" ? status.StatusCode.ToString() : reason) + ": " + status.Status.Detail;
    }
}

// Little-endian float32 and hashes.
internal static class Bytes
{
    public static byte[] Of(float[] values)
    {
        var data = new byte[4 * values.Length];
        for (int i = 0; i < values.Length; i++)
        {
            BinaryPrimitives.WriteSingleLittleEndian(data.AsSpan(4 * i), values[i]);
        }
        return data;
    }

    public static float[] Parse(byte[] data)
    {
        var values = new float[LeastSquares.Features];
        for (int i = 0; i < data.Length / 4; i++)
        {
            values[i] = BinaryPrimitives.ReadSingleLittleEndian(data.AsSpan(4 * i));
        }
        return values;
    }

    public static string Sha256(byte[] data)
    {
        return Hex(SHA256.HashData(data));
    }

    public static string Hex(byte[] data)
    {
        return Convert.ToHexString(data).ToLowerInvariant();
    }
}
