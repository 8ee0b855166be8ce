// A worker in Go: generated stubs and gRPC. What it computes: ../README.md.
package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"sync"
	"time"

	pb "ayni/v1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

const (
	features, samples, entries = 20000, 96, 8
	task                       = "ayni example: least squares 1"
	// Deadlines of short calls, of those that wait for other workers, and of the whole run.
	callLimit, waitLimit, runLimit = 30 * time.Second, 120 * time.Second, 600 * time.Second
)

// codec makes old releases of grpc, such as Debian's, use the messages as today's protoc-gen-go makes them.
type codec struct{}

func (codec) Marshal(v interface{}) ([]byte, error) { return proto.Marshal(v.(proto.Message)) }
func (codec) Unmarshal(data []byte, v interface{}) error {
	return proto.Unmarshal(data, v.(proto.Message))
}
func (codec) Name() string { return "proto" }

// The model. Every operation is rounded to float32 for itself (that is what the conversions of products are for:
// without them a compiler may fuse multiplication and addition); then any language gets the same bytes.

type vector []float32

func feature(sample, k int64) int64 { return (sample*199 + k*5970) % features }
func value(sample, k int64) float32 { return float32((sample*7+k*13)%17 - 8) }

// compute returns loss and gradient over the samples at positions start to stop - 1; no gradient where nothing has
// weight.
func compute(parameters vector, number uint32, start, stop int64) (vector, *pb.MicrobatchStats) {
	gradient, total, loss := make(vector, features), int64(0), 0.0
	for position := start; position < stop; position++ {
		sample := position % samples
		weight, target := sample/8%4, sample*37%101-50
		prediction := float32(0)
		for k := int64(0); k < entries; k++ {
			prediction += float32(parameters[feature(sample, k)] * value(sample, k))
		}
		failure := prediction - float32(target)
		scaled := float32(weight) * failure
		for k := int64(0); k < entries; k++ {
			gradient[feature(sample, k)] += float32(scaled * value(sample, k))
		}
		total += weight
		loss += float64(weight) * float64(failure) * float64(failure) / 2
	}
	if total == 0 {
		gradient = nil
	}
	return gradient, &pb.MicrobatchStats{Microbatch: number, Weight: total, LossSum: &loss}
}

// update makes one step of gradient descent.
func update(parameters, mean vector, commit *pb.CommitStepResponse) {
	rate, clip := float32(commit.LearningRate), float32(commit.ClipFactor)
	for i := range parameters {
		parameters[i] -= float32(rate * float32(clip*mean[i]))
	}
}

// encode returns a vector as it travels.
func encode(v vector) []byte {
	data := make([]byte, 4*len(v))
	for i, x := range v {
		binary.LittleEndian.PutUint32(data[4*i:], math.Float32bits(x))
	}
	return data
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// The tree.

type node struct{ start, stop uint32 }

// cover returns the fewest nodes of the tree over count micro-batches that make up start to stop - 1, left to right.
func cover(start, stop, count uint32) (nodes []node) {
	for start < stop {
		size := uint32(1)
		for start%(2*size) == 0 && size < count && least(start+2*size, count) <= stop {
			size *= 2
		}
		nodes = append(nodes, node{start, least(start+size, count)})
		start = least(start+size, count)
	}
	return nodes
}

func least(a, b uint32) uint32 {
	if a < b {
		return a
	}
	return b
}

// addUp returns the value of a node: left plus right; what is absent is left out.
func addUp(leaves map[uint32]vector, n node) vector {
	if n.stop-n.start == 1 {
		return leaves[n.start]
	}
	half := uint32(1)
	for 2*half < n.stop-n.start {
		half *= 2
	}
	left, right := addUp(leaves, node{n.start, n.start + half}), addUp(leaves, node{n.start + half, n.stop})
	if left == nil {
		return right
	}
	for i := range right {
		left[i] += right[i]
	}
	return left
}

// The calls.

// callError is a call that failed. Without a reason the transport broke.
type callError struct {
	reason string
	err    error
}

func (e *callError) Error() string { return strings.TrimPrefix(e.reason+": "+e.err.Error(), ": ") }

// failed returns nil for a call that ended well.
func failed(err error, trailer metadata.MD) error {
	if err == nil {
		return nil
	}
	return &callError{strings.Join(trailer.Get("ayni-reason"), ""), err}
}

// isDroppedStep says whether the next assignment is to be waited for; nothing of the step counts then.
func isDroppedStep(err error) bool {
	var call *callError
	return errors.As(err, &call) &&
		(call.reason == "STEP_VOIDED" || call.reason == "STALE_STEP" || call.reason == "STALE_EPOCH")
}

type worker struct {
	stub       pb.CoordinatorServiceClient
	headers    metadata.MD
	name       string
	id         uint32
	parameters vector
	losses     []float64
	mutex      sync.Mutex // Guards at.
	at         pb.HeartbeatRequest
}

func (w *worker) context(limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(metadata.NewOutgoingContext(context.Background(), w.headers), limit)
}

// run takes part in the whole run.
func (w *worker) run() error {
	membership, err := w.join()
	if err != nil {
		return err
	}
	over, ended := make(chan struct{}), make(chan struct{})
	go w.beat(membership, over, ended)
	end, err := w.followAssignments()
	close(over)
	<-ended
	ctx, cancel := w.context(callLimit)
	defer cancel()
	hash := digest(encode(w.parameters))
	_, _ = w.stub.Leave(ctx, &pb.LeaveRequest{WorkerId: w.id, Reason: "the run is over", ParametersSha256: hash})
	if err != nil {
		return err
	}
	if !end.Finished {
		return fmt.Errorf("the run was stopped: %s", end.Reason)
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]interface{}{
		"language": "go", "worker": w.name, "steps": end.CommittedSteps, "parameters_sha256": hash,
		"first_loss": w.losses[0], "loss": w.losses[len(w.losses)-1],
	})
}

func (w *worker) join() (*pb.JoinResponse, error) {
	ctx, cancel := w.context(callLimit)
	defer cancel()
	var trailer metadata.MD
	options := []grpc.CallOption{grpc.WaitForReady(true), grpc.Trailer(&trailer)}
	run, err := w.stub.GetRun(ctx, &pb.GetRunRequest{}, options...)
	if err != nil {
		return nil, failed(err, trailer)
	}
	if run.ProtocolVersion != 1 {
		return nil, fmt.Errorf("the coordinator speaks version %d of the protocol, not 1", run.ProtocolVersion)
	}
	nonce := make([]byte, 16)
	if _, err := rand.Read(nonce); err != nil {
		return nil, err
	}
	answer, err := w.stub.Join(ctx, &pb.JoinRequest{
		ProtocolVersion:    1,
		WorkerName:         w.name,
		JoinNonce:          hex.EncodeToString(nonce),
		Backend:            "cpu",
		WireTypes:          []pb.DType{pb.DType_DTYPE_FLOAT32},
		NumTrainingSamples: samples,
		TaskFingerprint:    digest([]byte(task)),
		TaskSummary:        "least squares of the example clients",
	}, options...)
	if err != nil {
		return nil, failed(err, trailer)
	}
	if answer.WireType != pb.DType_DTYPE_FLOAT32 || answer.Topology != "star" {
		return nil, errors.New("this example sends float32 to the coordinator; the run file says something else")
	}
	w.id = answer.WorkerId
	w.headers.Set("ayni-session", answer.Session)
	say("joined %s as worker %d", answer.RunId, w.id)
	return answer, nil
}

// beat gives signs of life. What is wrong with them ends the stream of assignments as well.
func (w *worker) beat(membership *pb.JoinResponse, over, ended chan struct{}) {
	defer close(ended)
	ticker := time.NewTicker(membership.HeartbeatInterval.AsDuration())
	defer ticker.Stop()
	for {
		select {
		case <-over:
			return
		case <-ticker.C:
		}
		w.mutex.Lock()
		request := proto.Clone(&w.at).(*pb.HeartbeatRequest)
		w.mutex.Unlock()
		ctx, cancel := w.context(membership.Lease.AsDuration())
		if _, err := w.stub.Heartbeat(ctx, request); err != nil {
			say("no heartbeat: %v", err)
		}
		cancel()
	}
}

func (w *worker) now(epoch, step int64, activity string) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.at.WorkerId, w.at.Epoch, w.at.Step, w.at.Activity = w.id, epoch, step, activity
}

func (w *worker) followAssignments() (*pb.Shutdown, error) {
	w.now(0, -1, "waiting")
	ctx, cancel := w.context(runLimit)
	defer cancel()
	hash := digest(encode(w.parameters))
	stream, err := w.stub.ShardAssignment(ctx, &pb.ShardAssignmentRequest{WorkerId: w.id, ParametersSha256: hash})
	if err != nil {
		return nil, err
	}
	var end *pb.Shutdown
	for {
		frame, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, failed(err, stream.Trailer())
		}
		switch content := frame.Frame.(type) {
		case *pb.ShardAssignmentResponse_Assignment:
			if err := w.tryStep(content.Assignment); err != nil {
				return nil, err
			}
		case *pb.ShardAssignmentResponse_Waiting:
			say("%s", content.Waiting.Reason)
		case *pb.ShardAssignmentResponse_Shutdown:
			end = content.Shutdown
		}
	}
	if end == nil {
		return nil, errors.New("the stream of assignments ended without a shutdown")
	}
	say("%s", end.Reason)
	return end, nil
}

func (w *worker) tryStep(lease *pb.Assignment) error {
	err := w.step(lease)
	if isDroppedStep(err) {
		say("attempt %d of step %d is void: %v", lease.Attempt, lease.Step, err)
		err = nil
	}
	w.now(lease.Epoch, lease.Step, "waiting")
	return err
}

func (w *worker) step(lease *pb.Assignment) error {
	if lease.Kind != pb.StepKind_STEP_KIND_TRAIN {
		return errors.New("this example does not evaluate")
	}
	if lease.Step != int64(len(w.losses)) {
		return fmt.Errorf("the run is at step %d, but this worker has made %d", lease.Step, len(w.losses))
	}
	w.now(lease.Epoch, lease.Step, "computing")
	leaves, stats := map[uint32]vector{}, []*pb.MicrobatchStats{}
	for m := lease.MicrobatchStart; m < lease.MicrobatchStop; m++ {
		gradient, said := compute(w.parameters, m, positionOf(lease, m), positionOf(lease, m+1))
		leaves[m], stats = gradient, append(stats, said)
	}
	var parts []vector
	for _, n := range cover(lease.MicrobatchStart, lease.MicrobatchStop, lease.NumMicrobatches) {
		parts = append(parts, addUp(leaves, n))
	}
	mean, err := w.reduce(lease, parts, stats)
	if err != nil {
		return err
	}
	commit, err := w.commit(lease, stats)
	if err != nil {
		return err
	}
	w.losses = append(w.losses, commit.GlobalLoss)
	if commit.TotalWeight != 0 {
		update(w.parameters, mean, commit)
	}
	return nil
}

func positionOf(lease *pb.Assignment, microbatch uint32) int64 {
	return lease.Position + int64(microbatch)*lease.NumSamples/int64(lease.NumMicrobatches)
}

// reduce contributes to the one bucket and returns the mean.
func (w *worker) reduce(lease *pb.Assignment, parts []vector, stats []*pb.MicrobatchStats) (vector, error) {
	w.now(lease.Epoch, lease.Step, "exchanging")
	ctx, cancel := w.context(waitLimit)
	defer cancel()
	stream, err := w.stub.Gradient(ctx)
	if err != nil {
		return nil, err
	}
	round := &pb.RoundBegin{
		WorkerId: w.id, Epoch: lease.Epoch, Step: lease.Step, Attempt: lease.Attempt, LeaseId: lease.LeaseId,
		Tensor:       &pb.TensorSpec{Dtype: pb.DType_DTYPE_FLOAT32, NumElements: features},
		Microbatches: stats,
		NumBuckets:   1,
	}
	begin := &pb.GradientRequest{Frame: &pb.GradientRequest_Begin{Begin: &pb.GradientBegin{Round: round}}}
	_ = stream.Send(begin) // What is wrong with it, Recv says.
	var data []byte
	isComplete := false
	for {
		frame, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, failed(err, stream.Trailer())
		}
		switch content := frame.Frame.(type) {
		case *pb.GradientResponse_Accepted:
			go send(stream, content.Accepted, parts) // Chunks go out while those of the mean come in.
		case *pb.GradientResponse_Chunk:
			if content.Chunk.OffsetBytes != uint64(len(data)) {
				return nil, fmt.Errorf("a chunk begins at %d, not at %d", content.Chunk.OffsetBytes, len(data))
			}
			data = append(data, content.Chunk.Data...)
		case *pb.GradientResponse_Complete:
			isComplete = true
		}
	}
	if !isComplete || len(data) != 0 && len(data) != 4*features {
		return nil, errors.New("a gradient stream ended before it was complete")
	}
	mean := make(vector, features) // Without any weight there is none.
	for i := 0; i < len(data)/4; i++ {
		mean[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return mean, nil
}

func send(stream pb.CoordinatorService_GradientClient, accepted *pb.RoundAccepted, parts []vector) {
	for number, part := range parts {
		if part == nil || accepted.AlreadyHeld {
			continue
		}
		data := encode(part)
		for offset := 0; offset < len(data); offset += int(accepted.ChunkBytes) {
			stop := int(least(uint32(offset)+accepted.ChunkBytes, uint32(len(data))))
			chunk := &pb.Chunk{OffsetBytes: uint64(offset), Part: uint32(number), Data: data[offset:stop]}
			if stream.Send(&pb.GradientRequest{Frame: &pb.GradientRequest_Chunk{Chunk: chunk}}) != nil {
				return // Recv says why.
			}
		}
	}
	_ = stream.CloseSend()
}

func (w *worker) commit(lease *pb.Assignment, stats []*pb.MicrobatchStats) (*pb.CommitStepResponse, error) {
	w.now(lease.Epoch, lease.Step, "waiting")
	ctx, cancel := w.context(waitLimit)
	defer cancel()
	var trailer metadata.MD
	commit, err := w.stub.CommitStep(ctx, &pb.CommitStepRequest{
		WorkerId: w.id, Epoch: lease.Epoch, Step: lease.Step, Attempt: lease.Attempt, LeaseId: lease.LeaseId,
		Kind:             lease.Kind,
		NumBuckets:       1,
		Microbatches:     stats,
		ParametersSha256: digest(encode(w.parameters)),
	}, grpc.Trailer(&trailer))
	return commit, failed(err, trailer)
}

func say(format string, values ...interface{}) { fmt.Fprintf(os.Stderr, format+"\n", values...) }

func run() error {
	coordinator := flag.String("coordinator", "", "host:port")
	tokenFile := flag.String("token-file", "", "file with the join token")
	name := flag.String("name", "", "name of this worker")
	ca := flag.String("ca", "", "PEM file of the authority; switches TLS on")
	flag.Parse()
	token, err := os.ReadFile(*tokenFile)
	if err != nil {
		return err
	}
	security := grpc.WithInsecure()
	if *ca != "" {
		authority, err := credentials.NewClientTLSFromFile(*ca, "")
		if err != nil {
			return err
		}
		security = grpc.WithTransportCredentials(authority)
	}
	channel, err := grpc.Dial(*coordinator, security, grpc.WithDefaultCallOptions(grpc.ForceCodec(codec{})))
	if err != nil {
		return err
	}
	defer channel.Close()
	headers := metadata.Pairs("authorization", "Bearer "+strings.TrimSpace(string(token)))
	stub := pb.NewCoordinatorServiceClient(channel)
	w := &worker{stub: stub, headers: headers, name: *name, parameters: make(vector, features)}
	return w.run()
}

func main() {
	if err := run(); err != nil {
		say("%v", err)
		os.Exit(1)
	}
}
