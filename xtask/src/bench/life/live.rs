//! Jobs on a disk in use: Spile's beside those of qemu-storage-daemon, on the same work.
//!
//! Each side's server has the disk open and exports it by NBD; nobody has requests. Both are asked over their control sockets. The time goes from
//! the order to the end of the job, and to the moment when what it has written is durable.

use super::super::kinds::Front;
use super::super::server::Server;
use super::super::{Plan, shell};
use super::merges::{MASTERS, QEMU, SPILE, put};
use super::{World, show};
use crate::Result;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// How often Spile is asked how far its job is. The other side tells it by itself.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// The longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(300);
/// What copies are made to, and the image that takes the writes behind a snapshot.
const COPY: &str = "copy.raw";
const TOP: &str = "top.qcow2";
const QSD: &str = "qemu-storage-daemon";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Job {
    Snapshot,
    Merge,
    Flatten,
    Mirror,
    Backup,
}

impl Job {
    const ALL: [Self; 5] = [Self::Snapshot, Self::Merge, Self::Flatten, Self::Mirror, Self::Backup];

    fn name(self) -> &'static str {
        match self {
            Self::Snapshot => "live snapshot",
            Self::Merge => "live merge of the leaf",
            Self::Flatten => "live flatten",
            Self::Mirror => "live move",
            Self::Backup => "live backup",
        }
    }

    /// What the other side calls it.
    fn command(self) -> &'static str {
        match self {
            Self::Snapshot => "blockdev-snapshot",
            Self::Merge => "block-commit",
            Self::Flatten => "block-stream",
            Self::Mirror => "blockdev-mirror",
            Self::Backup => "blockdev-backup",
        }
    }
}

/// Measures all jobs that were asked for.
pub fn run(plan: &Plan, world: &mut World) -> Result<Vec<Value>> {
    let mut results = Vec::new();
    for job in Job::ALL.into_iter().filter(|job| plan.asks_for(job.name())) {
        if !shell::on_path(QSD) || !shell::on_path("qemu-img") {
            println!("SKIP bench-life {}: no {QSD}", job.name());
            continue;
        }
        if !world.path(MASTERS).exists() {
            super::merges::make(world)?;
        }
        let mut times_s = [Vec::new(), Vec::new()];
        for round in 0..plan.rounds {
            for turn in 0..2 {
                let side = (round + turn) % 2;
                let time_s = if side == 0 { by_spile(world, job) } else { by_qemu(world, job) };
                world.server = None;
                times_s[side].push(time_s.map_err(|problem| format!("{}, side {side}: {problem}", job.name()))?);
            }
        }
        results.push(show(job.name(), 1.0, &[("spile", false), (job.command(), false)], &times_s));
    }
    Ok(results)
}

/// Puts the images there, and removes what was made before.
fn begin(world: &World, images: &[&str]) -> Result<()> {
    for entry in world.folder.read_dir().map_err(|error| format!("{}: {error}", world.folder.display()))?.flatten() {
        if entry.path().is_file() {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    put(world, images)
}

fn sync(world: &World) -> Result<()> {
    shell::run(Command::new("sync").arg("--file-system").arg(&world.folder))
}

/// Seconds that Spile takes for `job`.
fn by_spile(world: &mut World, job: Job) -> Result<f64> {
    begin(world, &SPILE)?;
    let control = world.socket().with_extension("control");
    let mut serve = world.spile(&["serve"]);
    serve.arg(format!("{},name=d", world.path(SPILE[1]).display()));
    serve.arg("--nbd").arg(format!("unix:{}", world.socket().display())).arg("--control").arg(&control);
    world.serve_by(serve)?;
    sync(world)?;
    let copy = world.path(COPY);
    let (path, order) = match job {
        Job::Snapshot => ("/v1/snapshots", json!({ "disks": ["d"], "name": "snap" })),
        Job::Merge => ("/v1/jobs", json!({ "disk": "d", "kind": "coalesce" })),
        Job::Flatten => ("/v1/jobs", json!({ "disk": "d", "kind": "flatten" })),
        Job::Mirror => ("/v1/jobs", json!({ "disk": "d", "kind": "move", "to": copy })),
        Job::Backup => ("/v1/backups", json!({ "disks": [{ "disk": "d", "target": copy }] })),
    };
    let begun = Instant::now();
    let mut answer = http(&control, "POST", path, Some(&order))?;
    if job == Job::Backup {
        answer = answer["jobs"][0].take();
    }
    let id = answer["id"].as_str().map(str::to_owned);
    while let Some(id) = &id
        && answer["state"] != "done"
    {
        if answer["state"] != "running" || begun.elapsed() > PATIENCE {
            return Err(format!("the job has not ended well: {answer}"));
        }
        std::thread::sleep(LOOK_EVERY);
        answer = http(&control, "GET", &format!("/v1/jobs/{id}"), None)?;
    }
    if id.is_none() && job != Job::Snapshot {
        return Err(format!("no job was begun: {answer}"));
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// One request over a control socket, and its answer.
fn http(socket: &PathBuf, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
    let failed = |error: std::io::Error| format!("{method} {path}: {error}");
    let body = body.map(Value::to_string).unwrap_or_default();
    let mut stream = UnixStream::connect(socket).map_err(failed)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
    let head =
        format!("{method} {path} HTTP/1.1\r\nHost: spile\r\nConnection: close\r\nContent-Type: application/json\r\n");
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).map_err(failed)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(failed)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let is_fine = head.split(' ').nth(1).is_some_and(|status| status.starts_with('2'));
    match serde_json::from_str(body) {
        Ok(value) if is_fine => Ok(value),
        _ => Err(format!("{method} {path}: {answer}")),
    }
}

/// Seconds that qemu-storage-daemon takes for `job`.
fn by_qemu(world: &mut World, job: Job) -> Result<f64> {
    begin(world, &QEMU)?;
    let (leaf, copy, top) = (world.path(QEMU[1]), world.path(COPY), world.path(TOP));
    let file =
        |path: &PathBuf| json!({ "driver": "file", "filename": path, "cache": { "direct": true }, "aio": "io_uring" });
    let made = match job {
        Job::Merge => world.path(QEMU[0]),
        Job::Flatten => leaf.clone(),
        Job::Snapshot => {
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).arg(&leaf).arg(&top);
            world.run(create)?;
            top.clone()
        }
        Job::Mirror | Job::Backup => {
            let made = File::create(&copy).and_then(|file| file.set_len(world.size_bytes));
            made.map_err(|error| format!("{}: {error}", copy.display()))?;
            copy.clone()
        }
    };
    let nbd = world.socket().with_extension("nbd");
    let _ = std::fs::remove_file(&nbd);
    let mut serve = Command::new(QSD);
    serve.arg("--chardev").arg(format!("socket,path={},server=on,wait=off,id=m", world.socket().display()));
    serve.args(["--monitor", "chardev=m", "--blockdev"]);
    serve.arg(json!({ "driver": "qcow2", "node-name": "disk", "file": file(&leaf) }).to_string());
    serve.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", nbd.display()));
    serve.args(["--export", "type=nbd,id=e,node-name=disk,writable=on"]);
    world.server = Some(Server::spawn(&mut serve, world.socket(), Front::Nbd)?);
    let mut qmp = Qmp::connect(&world.socket())?;
    sync(world)?;
    let begun = Instant::now();
    let order = match job {
        Job::Snapshot => {
            qmp.ask(
                "blockdev-add",
                json!({ "driver": "qcow2", "node-name": "top", "backing": null, "file": file(&top) }),
            )?;
            json!({ "node": "disk", "overlay": "top" })
        }
        Job::Merge | Job::Flatten => json!({ "job-id": "j", "device": "disk" }),
        Job::Mirror | Job::Backup => {
            qmp.ask("blockdev-add", json!({ "driver": "raw", "node-name": "target", "file": file(&copy) }))?;
            json!({ "job-id": "j", "device": "disk", "target": "target", "sync": "full" })
        }
    };
    qmp.ask(job.command(), order)?;
    if job != Job::Snapshot {
        qmp.wait()?;
    }
    let durable = File::open(&made).and_then(|file| file.sync_all());
    durable.map_err(|error| format!("{}: {error}", made.display()))?;
    Ok(begun.elapsed().as_secs_f64())
}

/// A connection to a monitor.
struct Qmp {
    stream: BufReader<UnixStream>,
    /// Events that came before they were wanted.
    events: Vec<Value>,
}

impl Qmp {
    fn connect(socket: &PathBuf) -> Result<Self> {
        let stream =
            UnixStream::connect(socket).and_then(|stream| stream.set_read_timeout(Some(PATIENCE)).map(|()| stream));
        let stream = stream.map_err(|error| format!("{}: {error}", socket.display()))?;
        let mut qmp = Self { stream: BufReader::new(stream), events: Vec::new() };
        qmp.read()?;
        qmp.ask("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.stream.read_line(&mut line).map_err(|error| format!("the monitor: {error}"))?;
        serde_json::from_str(&line).map_err(|error| format!("the monitor says {line:?}: {error}"))
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Result<()> {
        let order = json!({ "execute": command, "arguments": arguments });
        writeln!(self.stream.get_mut(), "{order}").map_err(|error| format!("{command}: {error}"))?;
        loop {
            let answer = self.read()?;
            match (answer.get("return"), answer.get("error")) {
                (_, Some(error)) => return Err(format!("{command}: {error}")),
                (Some(_), None) => return Ok(()),
                (None, None) => self.events.push(answer),
            }
        }
    }

    /// Waits for the end of the job. One that is ready, and goes on until it is told to end, is told so.
    fn wait(&mut self) -> Result<()> {
        loop {
            let event = if self.events.is_empty() { self.read()? } else { self.events.remove(0) };
            match event["event"].as_str() {
                Some("BLOCK_JOB_READY") => self.ask("job-complete", json!({ "id": "j" }))?,
                Some("BLOCK_JOB_COMPLETED") => {
                    return event["data"].get("error").map_or(Ok(()), |error| Err(format!("the job: {error}")));
                }
                Some("BLOCK_JOB_CANCELLED") => return Err("the job was cancelled".to_string()),
                _ => {}
            }
        }
    }
}
