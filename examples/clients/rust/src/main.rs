//! A worker in Rust: generated messages, and gRPC as a few frames over h2. What it computes: ../../README.md.
//!
//! With the public registry, tonic has a generated client in place of the part "gRPC over h2".

use std::collections::HashMap;
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request};
use prost::Message;
use sha2::{Digest, Sha256};
use tokio::time::timeout;

#[allow(dead_code)] // This worker uses only a part of the messages.
mod pb {
    include!(concat!(env!("OUT_DIR"), "/ayni.v1.rs"));
}
use pb::{gradient_request, gradient_response, shard_assignment_response};

const FEATURES: usize = 20000;
const SAMPLES: i64 = 96;
const ENTRIES: i64 = 8;
const TASK: &str = "ayni example: least squares 1";
/// Deadlines of short calls, of those that wait for other workers, and of the whole run.
const CALL: Duration = Duration::from_secs(30);
const WAIT: Duration = Duration::from_secs(120);
const RUN: Duration = Duration::from_secs(600);

type Vector = Vec<f32>;

/// What went wrong. Without a reason it was no refusal.
#[derive(Debug, Default)]
struct Failure {
    reason: String,
    text: String,
}

impl Failure {
    /// Whether the next assignment is to be waited for; nothing of the step counts then.
    fn is_dropped_step(&self) -> bool {
        ["STEP_VOIDED", "STALE_STEP", "STALE_EPOCH"].contains(&self.reason.as_str())
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        fail(error)
    }
}

fn fail(text: impl ToString) -> Failure {
    Failure { text: text.to_string(), ..Failure::default() }
}

// The model. Every operation is rounded to float32 for itself, as Rust does anyhow: then any language gets the same
// bytes.

fn feature(sample: i64, k: i64) -> usize {
    ((sample * 199 + k * 5970) % FEATURES as i64) as usize
}

fn value(sample: i64, k: i64) -> f32 {
    ((sample * 7 + k * 13) % 17 - 8) as f32
}

/// Loss and gradient over the samples at positions start to stop - 1; no gradient where nothing has weight.
fn compute(parameters: &Vector, number: u32, start: i64, stop: i64) -> (Option<Vector>, pb::MicrobatchStats) {
    let (mut gradient, mut total, mut loss) = (vec![0f32; FEATURES], 0i64, 0f64);
    for position in start..stop {
        let sample = position % SAMPLES;
        let (weight, target) = (sample / 8 % 4, sample * 37 % 101 - 50);
        let mut prediction = 0f32;
        for k in 0..ENTRIES {
            prediction += parameters[feature(sample, k)] * value(sample, k);
        }
        let error = prediction - target as f32;
        let scaled = weight as f32 * error;
        for k in 0..ENTRIES {
            gradient[feature(sample, k)] += scaled * value(sample, k);
        }
        total += weight;
        loss += weight as f64 * error as f64 * error as f64 / 2.0;
    }
    let stats = pb::MicrobatchStats { microbatch: number, weight: total, loss_sum: Some(loss), ..Default::default() };
    ((total != 0).then_some(gradient), stats)
}

/// One step of gradient descent.
fn update(parameters: &mut Vector, mean: &Vector, commit: &pb::CommitStepResponse) {
    let (rate, clip) = (commit.learning_rate as f32, commit.clip_factor as f32);
    for (parameter, gradient) in parameters.iter_mut().zip(mean) {
        *parameter -= rate * (clip * gradient);
    }
}

/// A vector as it travels.
fn encode(vector: &Vector) -> Bytes {
    vector.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn digest(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

// The tree.

/// The fewest nodes of the tree over `count` micro-batches that make up start to stop - 1, left to right.
fn cover(mut start: u32, stop: u32, count: u32) -> Vec<(u32, u32)> {
    let mut nodes = Vec::new();
    while start < stop {
        let mut size = 1;
        while start % (2 * size) == 0 && size < count && count.min(start + 2 * size) <= stop {
            size *= 2;
        }
        nodes.push((start, count.min(start + size)));
        start = count.min(start + size);
    }
    nodes
}

/// The value of a node: left plus right; what is absent is left out.
fn add_up(leaves: &mut HashMap<u32, Option<Vector>>, start: u32, stop: u32) -> Option<Vector> {
    if stop - start == 1 {
        return leaves.remove(&start).flatten();
    }
    let mut half = 1;
    while 2 * half < stop - start {
        half *= 2;
    }
    let (left, right) = (add_up(leaves, start, start + half), add_up(leaves, start + half, stop));
    match (left, right) {
        (Some(left), Some(right)) => Some(left.iter().zip(&right).map(|(a, b)| a + b).collect()),
        (left, right) => left.or(right),
    }
}

// gRPC over h2: a call is one stream; a message is a byte for "not compressed", its length in four bytes, and itself.

#[derive(Clone)]
struct Channel {
    connection: SendRequest<Bytes>,
    address: String,
    token: String,
    session: String,
}

impl Channel {
    async fn open(address: &str, token: String) -> Result<Channel, Failure> {
        let socket = timeout(CALL, tokio::net::TcpStream::connect(address)).await??;
        socket.set_nodelay(true)?;
        let window = 4 << 20;
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(window).initial_connection_window_size(window);
        let (connection, driver) = builder.handshake(socket).await?;
        tokio::spawn(driver);
        Ok(Channel { connection, address: address.to_string(), token, session: String::new() })
    }

    async fn call(&self, method: &str, limit: Duration) -> Result<Call, Failure> {
        let mut request = Request::post(format!("http://{}/ayni.v1.CoordinatorService/{method}", self.address))
            .header("te", "trailers")
            .header("content-type", "application/grpc")
            .header("grpc-timeout", format!("{}m", limit.as_millis()))
            .header("authorization", format!("Bearer {}", self.token));
        if !self.session.is_empty() {
            request = request.header("ayni-session", &self.session);
        }
        let mut connection = self.connection.clone().ready().await?;
        let (response, sender) = connection.send_request(request.body(())?, false)?;
        let receiver = Receiver { response: Some(response), body: None, buffer: BytesMut::new() };
        Ok(Call { sender: Sender(sender), receiver })
    }

    /// A call with one request and one response.
    async fn unary<A: Message + Default>(
        &self,
        method: &str,
        request: impl Message,
        limit: Duration,
    ) -> Result<A, Failure> {
        let answer = async {
            let mut call = self.call(method, limit).await?;
            call.sender.send(&request).await?;
            call.sender.half_close()?;
            let answer = call.receiver.next().await?.ok_or_else(|| fail("a call ended without an answer"))?;
            call.receiver.next::<A>().await?;
            Ok(answer)
        };
        timeout(limit, answer).await?
    }
}

struct Call {
    sender: Sender,
    receiver: Receiver,
}

struct Sender(SendStream<Bytes>);

impl Sender {
    async fn send(&mut self, message: &impl Message) -> Result<(), Failure> {
        let mut frame = BytesMut::new();
        frame.put_u8(0);
        frame.put_u32(message.encoded_len() as u32);
        message.encode(&mut frame)?;
        while !frame.is_empty() {
            self.0.reserve_capacity(frame.len());
            let capacity = std::future::poll_fn(|context| self.0.poll_capacity(context)).await;
            let room = capacity.ok_or_else(|| fail("the stream is closed"))??;
            self.0.send_data(frame.split_to(room.min(frame.len())).freeze(), false)?;
        }
        Ok(())
    }

    fn half_close(&mut self) -> Result<(), Failure> {
        Ok(self.0.send_data(Bytes::new(), true)?)
    }
}

struct Receiver {
    response: Option<ResponseFuture>,
    body: Option<RecvStream>,
    buffer: BytesMut,
}

impl Receiver {
    /// The next message; None once the call has ended well.
    async fn next<A: Message + Default>(&mut self) -> Result<Option<A>, Failure> {
        if let Some(response) = self.response.take() {
            let (head, body) = response.await?.into_parts();
            if head.headers.contains_key("grpc-status") {
                return check(&head.headers).map(|()| None); // A call without any message has its status here.
            }
            self.body = Some(body);
        }
        let body = self.body.as_mut().ok_or_else(|| fail("the call is over"))?;
        loop {
            if self.buffer.len() >= 5 {
                let length =
                    u32::from_be_bytes([self.buffer[1], self.buffer[2], self.buffer[3], self.buffer[4]]) as usize;
                if length > 4 << 20 {
                    return Err(fail(format!("a message of {length} bytes is too long")));
                }
                if self.buffer.len() >= 5 + length {
                    self.buffer.advance(5);
                    return Ok(Some(A::decode(self.buffer.split_to(length).freeze())?));
                }
            }
            match body.data().await {
                Some(data) => {
                    let data = data?;
                    body.flow_control().release_capacity(data.len())?;
                    self.buffer.extend_from_slice(&data);
                }
                None => {
                    let trailers = body.trailers().await?.ok_or_else(|| fail("a call ended without a status"))?;
                    self.body = None;
                    return check(&trailers).map(|()| None);
                }
            }
        }
    }
}

fn check(trailers: &HeaderMap) -> Result<(), Failure> {
    let text = |name: &str| trailers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_string();
    match text("grpc-status").as_str() {
        "0" => Ok(()),
        code => {
            let (reason, message) = (text("ayni-reason"), text("grpc-message")); // The message is percent-encoded.
            Err(Failure { text: format!("{reason} (status {code}): {message}"), reason })
        }
    }
}

// The calls.

struct Worker {
    channel: Channel,
    name: String,
    id: u32,
    parameters: Vector,
    losses: Vec<f64>,
    at: Arc<Mutex<pb::HeartbeatRequest>>,
}

impl Worker {
    /// Takes part in the whole run; returns what is printed.
    async fn run(&mut self) -> Result<String, Failure> {
        let membership = self.join().await?;
        let heart = tokio::spawn(beat(self.channel.clone(), self.at.clone(), membership));
        let end = self.follow_assignments().await;
        heart.abort();
        let hash = digest(&encode(&self.parameters));
        let reason = "the run is over".to_string();
        let leave = pb::LeaveRequest { worker_id: self.id, reason, parameters_sha256: hash.clone() };
        let left = self.channel.unary::<pb::LeaveResponse>("Leave", leave, CALL).await;
        let end = end?;
        left?;
        if !end.finished {
            return Err(fail(format!("the run was stopped: {}", end.reason)));
        }
        Ok(format!(
            "{{\"language\": \"rust\", \"worker\": {:?}, \"steps\": {}, \"parameters_sha256\": \"{hash}\", \
             \"first_loss\": {:?}, \"loss\": {:?}}}",
            self.name,
            end.committed_steps,
            self.losses[0],
            self.losses[self.losses.len() - 1]
        ))
    }

    async fn join(&mut self) -> Result<pb::JoinResponse, Failure> {
        let run: pb::GetRunResponse = self.channel.unary("GetRun", pb::GetRunRequest::default(), CALL).await?;
        if run.protocol_version != 1 {
            return Err(fail(format!(
                "the coordinator speaks version {} of the protocol, not 1",
                run.protocol_version
            )));
        }
        let mut nonce = [0; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
        let request = pb::JoinRequest {
            protocol_version: 1,
            worker_name: self.name.clone(),
            join_nonce: digest(&nonce)[..32].to_string(),
            backend: "cpu".to_string(),
            wire_types: vec![pb::DType::DtypeFloat32 as i32],
            num_training_samples: SAMPLES,
            task_fingerprint: digest(TASK.as_bytes()),
            task_summary: "least squares of the example clients".to_string(),
            ..Default::default()
        };
        let answer: pb::JoinResponse = self.channel.unary("Join", request, CALL).await?;
        if answer.wire_type != pb::DType::DtypeFloat32 as i32 || answer.topology != "star" {
            return Err(fail("this example sends float32 to the coordinator; the run file says something else"));
        }
        self.id = answer.worker_id;
        self.channel.session = answer.session.clone();
        self.now(0, -1, "waiting");
        eprintln!("joined {} as worker {}", answer.run_id, self.id);
        Ok(answer)
    }

    fn now(&self, epoch: i64, step: i64, activity: &str) {
        let mut at = self.at.lock().unwrap();
        *at = pb::HeartbeatRequest {
            worker_id: self.id,
            epoch,
            step,
            activity: activity.to_string(),
            ..Default::default()
        };
    }

    async fn follow_assignments(&mut self) -> Result<pb::Shutdown, Failure> {
        let parameters_sha256 = digest(&encode(&self.parameters));
        let request = pb::ShardAssignmentRequest { worker_id: self.id, parameters_sha256, ..Default::default() };
        let mut call = self.channel.call("ShardAssignment", RUN).await?;
        call.sender.send(&request).await?;
        call.sender.half_close()?;
        let mut end = None;
        while let Some(frame) = timeout(RUN, call.receiver.next::<pb::ShardAssignmentResponse>()).await?? {
            match frame.frame {
                Some(shard_assignment_response::Frame::Assignment(lease)) => self.try_step(&lease).await?,
                Some(shard_assignment_response::Frame::Waiting(waiting)) => eprintln!("{}", waiting.reason),
                Some(shard_assignment_response::Frame::Shutdown(shutdown)) => end = Some(shutdown),
                _ => (),
            }
        }
        let end = end.ok_or_else(|| fail("the stream of assignments ended without a shutdown"))?;
        eprintln!("{}", end.reason);
        Ok(end)
    }

    async fn try_step(&mut self, lease: &pb::Assignment) -> Result<(), Failure> {
        match self.step(lease).await {
            Err(failure) if failure.is_dropped_step() => {
                eprintln!("attempt {} of step {} is void: {}", lease.attempt, lease.step, failure.text);
            }
            other => other?,
        }
        self.now(lease.epoch, lease.step, "waiting");
        Ok(())
    }

    async fn step(&mut self, lease: &pb::Assignment) -> Result<(), Failure> {
        if lease.kind != pb::StepKind::Train as i32 {
            return Err(fail("this example does not evaluate"));
        }
        if lease.step != self.losses.len() as i64 {
            let made = self.losses.len();
            return Err(fail(format!("the run is at step {}, but this worker has made {made}", lease.step)));
        }
        self.now(lease.epoch, lease.step, "computing");
        let (mut leaves, mut stats) = (HashMap::new(), Vec::new());
        for m in lease.microbatch_start..lease.microbatch_stop {
            let (start, stop) = (position_of(lease, m), position_of(lease, m + 1));
            let (gradient, said) = compute(&self.parameters, m, start, stop);
            leaves.insert(m, gradient);
            stats.push(said);
        }
        let nodes = cover(lease.microbatch_start, lease.microbatch_stop, lease.num_microbatches);
        let parts = nodes.into_iter().map(|(start, stop)| add_up(&mut leaves, start, stop)).collect();
        let mean = timeout(WAIT, self.reduce(lease, parts, stats.clone())).await??;
        let commit = self.commit(lease, stats).await?;
        self.losses.push(commit.global_loss);
        if commit.total_weight != 0 {
            update(&mut self.parameters, &mean, &commit);
        }
        Ok(())
    }

    /// Contributes to the one bucket and returns the mean.
    async fn reduce(
        &self,
        lease: &pb::Assignment,
        parts: Vec<Option<Vector>>,
        stats: Vec<pb::MicrobatchStats>,
    ) -> Result<Vector, Failure> {
        self.now(lease.epoch, lease.step, "exchanging");
        let tensor = pb::TensorSpec {
            dtype: pb::DType::DtypeFloat32 as i32,
            num_elements: FEATURES as u64,
            ..Default::default()
        };
        let round = pb::RoundBegin {
            worker_id: self.id,
            epoch: lease.epoch,
            step: lease.step,
            attempt: lease.attempt,
            lease_id: lease.lease_id,
            tensor: Some(tensor),
            microbatches: stats,
            num_buckets: 1,
        };
        let begin = gradient_request::Frame::Begin(pb::GradientBegin { round: Some(round) });
        let Call { mut sender, mut receiver } = self.channel.call("Gradient", WAIT).await?;
        sender.send(&pb::GradientRequest { frame: Some(begin) }).await?;
        let mut unsent = Some((sender, parts));
        let (mut data, mut is_complete) = (BytesMut::new(), false);
        while let Some(frame) = receiver.next::<pb::GradientResponse>().await? {
            match frame.frame {
                Some(gradient_response::Frame::Accepted(accepted)) => {
                    if let Some((sender, parts)) = unsent.take() {
                        tokio::spawn(send(sender, accepted, parts)); // Chunks go out while those of the mean come in.
                    }
                }
                Some(gradient_response::Frame::Chunk(chunk)) => {
                    if chunk.offset_bytes != data.len() as u64 {
                        return Err(fail(format!("a chunk begins at {}, not at {}", chunk.offset_bytes, data.len())));
                    }
                    data.extend_from_slice(&chunk.data);
                }
                Some(gradient_response::Frame::Complete(_)) => is_complete = true,
                None => (),
            }
        }
        if !is_complete || !data.is_empty() && data.len() != 4 * FEATURES {
            return Err(fail("a gradient stream ended before it was complete"));
        }
        // Without any weight there is no mean.
        let mut mean: Vector = data.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
        mean.resize(FEATURES, 0.0);
        Ok(mean)
    }

    async fn commit(
        &self,
        lease: &pb::Assignment,
        stats: Vec<pb::MicrobatchStats>,
    ) -> Result<pb::CommitStepResponse, Failure> {
        self.now(lease.epoch, lease.step, "waiting");
        let request = pb::CommitStepRequest {
            worker_id: self.id,
            epoch: lease.epoch,
            step: lease.step,
            attempt: lease.attempt,
            lease_id: lease.lease_id,
            kind: lease.kind,
            num_buckets: 1,
            microbatches: stats,
            parameters_sha256: digest(&encode(&self.parameters)),
            ..Default::default()
        };
        self.channel.unary("CommitStep", request, WAIT).await
    }
}

/// Gives signs of life. What is wrong with them ends the stream of assignments as well.
async fn beat(channel: Channel, at: Arc<Mutex<pb::HeartbeatRequest>>, membership: pb::JoinResponse) {
    let length = |given: Option<prost_types::Duration>| {
        given.map_or(Duration::from_secs(1), |span| Duration::new(span.seconds as u64, span.nanos as u32))
    };
    let (interval, lease) = (length(membership.heartbeat_interval), length(membership.lease));
    let mut ticks = tokio::time::interval(interval);
    loop {
        ticks.tick().await;
        let request = at.lock().unwrap().clone();
        let answer = channel.unary::<pb::HeartbeatResponse>("Heartbeat", request, lease).await;
        if let Err(failure) = answer {
            eprintln!("no heartbeat: {}", failure.text);
        }
    }
}

async fn send(mut sender: Sender, accepted: pb::RoundAccepted, parts: Vec<Option<Vector>>) -> Result<(), Failure> {
    for (number, part) in parts.iter().enumerate().filter(|_| !accepted.already_held) {
        let mut data = part.as_ref().map(encode).unwrap_or_default();
        let mut offset_bytes = 0;
        while !data.is_empty() {
            let content = data.split_to(data.len().min(accepted.chunk_bytes as usize));
            let length = content.len() as u64;
            let chunk = pb::Chunk { offset_bytes, part: number as u32, data: content.to_vec(), ..Default::default() };
            sender.send(&pb::GradientRequest { frame: Some(gradient_request::Frame::Chunk(chunk)) }).await?;
            offset_bytes += length;
        }
    }
    sender.half_close()
}

fn position_of(lease: &pb::Assignment, microbatch: u32) -> i64 {
    lease.position + microbatch as i64 * lease.num_samples / lease.num_microbatches as i64
}

async fn work() -> Result<String, Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given: HashMap<&str, &str> =
        arguments.chunks_exact(2).map(|pair| (pair[0].as_str(), pair[1].as_str())).collect();
    if given.contains_key("--ca") {
        return Err(fail("this example speaks no TLS; put a TLS stream, such as tokio-rustls, under h2"));
    }
    let get = |flag: &str| {
        let usage = "usage: worker --coordinator HOST:PORT --token-file FILE --name NAME";
        given.get(flag).copied().ok_or_else(|| fail(usage))
    };
    let token = std::fs::read_to_string(get("--token-file")?)?.trim().to_string();
    let channel = Channel::open(get("--coordinator")?, token).await?;
    let name = get("--name")?.to_string();
    let mut worker =
        Worker { channel, name, id: 0, parameters: vec![0.0; FEATURES], losses: Vec::new(), at: Arc::default() };
    worker.run().await
}

#[tokio::main(worker_threads = 2)]
async fn main() -> std::process::ExitCode {
    match work().await {
        Ok(line) => {
            println!("{line}");
            std::process::ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{}", failure.text);
            std::process::ExitCode::FAILURE
        }
    }
}
