//! A trace as a file for Perfetto: the JSON of Chromium's trace events
//! (<https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>), which ui.perfetto.dev opens.
//!
//! Each queue is a process, and each of its requests in flight has a thread of its own, so that slices on one track never overlap.
//! A request is a slice, and its phases are slices inside. Perfetto takes the thread whose number is that of its process for the main one, and
//! 0 for no number: processes count from 1 on, and threads have numbers that no process and no other thread has.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use spile_core::metrics::span::PHASES;
use spile_core::{Error, Result};
use spile_server::serving::api::trace::{TracedQueue, TracedRequest};

use super::super::output::{empty, report_file};
use super::phases::latency_ns;

/// A file for a trace.
pub struct Out {
    path: PathBuf,
    file: File,
}

/// Makes the file. An older trace is replaced once there is a new one.
///
/// # Errors
/// As [`report_file`].
pub fn create(path: &Path) -> Result<Out> {
    Ok(Out { path: path.to_owned(), file: report_file(path, "{\"displayTimeUnit\"")? })
}

/// Writes all requests.
///
/// # Errors
/// The system's, with the path.
pub fn write(out: Out, queues: &[TracedQueue], requests: &[TracedRequest]) -> Result<()> {
    let Out { path, file } = out;
    let written = empty(&file).and_then(|()| {
        let mut file = BufWriter::new(file);
        write_to(&mut file, queues, requests)?;
        file.flush()
    });
    written.map_err(|e| Error::io("write a trace", e).at_path(&path))
}

fn write_to(to: &mut impl Write, queues: &[TracedQueue], requests: &[TracedRequest]) -> std::io::Result<()> {
    write!(to, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let mut is_first = true;
    events(queues, requests, |event| {
        let comma = if std::mem::take(&mut is_first) { "" } else { "," };
        write!(to, "{comma}\n{event}")
    })?;
    writeln!(to, "\n]}}")
}

/// Gives all events to `each`, in the order of their begins on each track.
fn events(
    queues: &[TracedQueue],
    requests: &[TracedRequest],
    mut each: impl FnMut(Value) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let first_ns = requests.iter().map(|request| request.taken_ns).min().unwrap_or(0);
    let mut first_tid = queues.iter().map(pid).max().unwrap_or(0) as usize + 1;
    for queue in queues {
        let name = format!("{}, queue {}", queue.front, queue.queue);
        each(json!({ "ph": "M", "name": "process_name", "pid": pid(queue), "args": { "name": name } }))?;
        let mut own: Vec<_> = requests.iter().filter(|request| request.queue == queue.number).collect();
        own.sort_by_key(|request| request.taken_ns);
        let mut tracks = Tracks::default();
        for request in own {
            let (track, is_new) = tracks.place(request.taken_ns, request.phases_ns.iter().sum());
            let place = (pid(queue), first_tid + track);
            if is_new {
                let name = format!("request {} in flight", track + 1);
                let args = json!({ "name": name });
                each(json!({ "ph": "M", "name": "thread_name", "pid": place.0, "tid": place.1, "args": args }))?;
            }
            slices(request, place, first_ns).into_iter().try_for_each(&mut each)?;
        }
        first_tid += tracks.0.len();
    }
    Ok(())
}

/// The number of the process that stands for a queue.
fn pid(queue: &TracedQueue) -> u32 {
    queue.number + 1
}

/// When the last request on each track ends, in nanoseconds.
#[derive(Default)]
struct Tracks(Vec<u64>);

impl Tracks {
    /// The number of a track that is free at `from_ns`, and whether it is new.
    fn place(&mut self, from_ns: u64, time_ns: u64) -> (usize, bool) {
        let free = self.0.iter().position(|until_ns| *until_ns <= from_ns);
        let track = free.unwrap_or(self.0.len());
        match free {
            Some(track) => self.0[track] = from_ns + time_ns,
            None => self.0.push(from_ns + time_ns),
        }
        (track, free.is_none())
    }
}

/// A request and its phases on the track `pid` and `tid`. Phases that took no time are left out.
fn slices(request: &TracedRequest, (pid, tid): (u32, usize), first_ns: u64) -> Vec<Value> {
    let us = |ns: u64| ns as f64 / 1e3;
    let slice = |name: &str, category: &str, from_ns: u64, time_ns: u64, args: Value| {
        json!({
            "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid,
            "ts": us(from_ns), "dur": us(time_ns), "args": args,
        })
    };
    let mut at_ns = request.taken_ns - first_ns;
    let about = json!({
        "offset_bytes": request.offset_bytes,
        "len_bytes": request.len_bytes,
        "store_operations": request.store_operations,
        "latency_us": us(latency_ns(request)),
        "failed": request.failed,
    });
    let mut slices = vec![slice(&request.operation, "request", at_ns, request.phases_ns.iter().sum(), about)];
    for (phase, time_ns) in PHASES.iter().zip(&request.phases_ns) {
        if *time_ns > 0 {
            slices.push(slice(phase.name, "phase", at_ns, *time_ns, json!({ "about": phase.about })));
        }
        at_ns += time_ns;
    }
    slices
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(queue: u32, taken_ns: u64) -> TracedRequest {
        TracedRequest {
            queue,
            operation: "write".to_owned(),
            offset_bytes: 4096,
            len_bytes: 512,
            failed: false,
            store_operations: 1,
            taken_ns,
            phases_ns: vec![10, 0, 0, 20, 300, 40, 0, 0, 60, 70],
        }
    }

    /// Whether slices on each track are one after the other or one inside the other, as the format demands.
    fn check_nesting(slices: &[&Value]) {
        let ns = |value: &Value| (value.as_f64().unwrap() * 1e3).round() as u64;
        let mut open: std::collections::HashMap<(u64, u64), Vec<u64>> = Default::default();
        for slice in slices {
            let open = open.entry((slice["pid"].as_u64().unwrap(), slice["tid"].as_u64().unwrap())).or_default();
            let (from, until) = (ns(&slice["ts"]), ns(&slice["ts"]) + ns(&slice["dur"]));
            open.retain(|end| *end > from);
            assert!(open.iter().all(|end| until <= *end), "{slice}");
            open.push(until);
        }
    }

    #[test]
    fn slices_nest_and_phases_add_up() {
        let queue = |number| TracedQueue { number, front: "front nbd \"\"".to_owned(), queue: number };
        // Two overlap, the third one begins when the first one has ended.
        let requests = [request(0, 1000), request(0, 1100), request(0, 1500), request(1, 1200)];
        let mut text = Vec::new();
        write_to(&mut text, &[queue(0), queue(1)], &requests).unwrap();
        let trace: Value = serde_json::from_slice(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let names: Vec<_> = events.iter().filter(|event| event["ph"] == "M").map(|event| &event["name"]).collect();
        assert_eq!(names, ["process_name", "thread_name", "thread_name", "process_name", "thread_name"]);
        let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        check_nesting(&slices);
        let tracks: std::collections::BTreeSet<_> =
            slices.iter().map(|slice| (slice["pid"].as_u64().unwrap(), slice["tid"].as_u64().unwrap())).collect();
        assert_eq!(tracks.into_iter().collect::<Vec<_>>(), [(1, 3), (1, 4), (2, 5)]);
        let requests: Vec<_> = slices.iter().filter(|slice| slice["cat"] == "request").collect();
        assert_eq!(requests.len(), 4);
        assert!(requests.iter().all(|slice| slice["dur"] == 0.5 && slice["args"]["latency_us"] == 0.43));
        let phases = slices.iter().filter(|slice| slice["cat"] == "phase");
        let sum_us: f64 = phases.map(|slice| slice["dur"].as_f64().unwrap()).sum();
        assert!((sum_us - 4.0 * 0.5).abs() < 1e-9);
    }

    #[test]
    fn an_empty_trace_is_a_trace() {
        let mut text = Vec::new();
        write_to(&mut text, &[], &[]).unwrap();
        let trace: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(trace["traceEvents"], json!([]));
    }
}
