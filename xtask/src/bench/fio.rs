//! The medium without a server: fio with io_uring, one process on the file itself. Its own CPU time stands where that of
//! a server does.

use super::Plan;
use super::figures::Point;
use super::lines::{Cache, Line, Memory, Side};
use super::server::{pinned, server_cores};
use crate::{Result, shell};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

/// One point: the load of `line` on `image`.
pub fn run(plan: &Plan, line: &Line, side: &Side, round: usize, image: &Path) -> Result<Point> {
    let mut fio = command(side, image);
    fio.arg(format!("--rw={}", line.pattern)).arg(format!("--bs={}", line.block));
    fio.arg(format!("--iodepth={}", line.depth)).arg(format!("--randseed={}", round + 1));
    if line.memory == Memory::Huge {
        fio.arg("--iomem=mmaphuge");
    }
    match line.requests {
        Some(count) => fio.arg(format!("--number_ios={count}")),
        // Milliseconds: some versions read a fraction of a second as 0.
        None => fio.arg("--time_based").arg(format!("--runtime={}ms", Line::runtime_ms(plan))),
    };
    let before_s = children_cpu_s()?;
    let text = shell::output(&mut fio).map_err(|problem| format!("{} on {}: {problem}", line.name, side.name))?;
    let mut point = read(&text)?;
    if line.writes() && side.cache == Cache::Page {
        // The kernel's helper threads do these writes, and fio counts only its own thread's time.
        let whole_s = children_cpu_s()? - before_s - start_up_cpu_s(side, image)?;
        let requests = point.all["jobs"][0]["write"]["total_ios"].as_f64().unwrap_or(f64::NAN);
        point.server_cpu_us = (whole_s * 1e6 / requests).max(point.server_cpu_us);
    }
    Ok(point)
}

fn command(side: &Side, image: &Path) -> Command {
    let mut fio = pinned(&server_cores(side.cores), "fio");
    fio.arg("--name=bare").arg(format!("--filename={}", image.display()));
    // As the servers find the file: there, whole, and its pages in the cache where they are to be.
    fio.args(["--allow_file_create=0", "--invalidate=0", "--fadvise_hint=0", "--norandommap"]);
    fio.args(["--ioengine=io_uring", if side.cache == Cache::Direct { "--direct=1" } else { "--direct=0" }]);
    fio.args(["--lat_percentiles=1", "--clat_percentiles=0", "--eta=never", "--output-format=json"]);
    fio
}

fn read(text: &str) -> Result<Point> {
    // Notes may stand before the JSON.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let all: Value = serde_json::from_str(json).map_err(|error| format!("fio: {error}: {text}"))?;
    let job = &all["jobs"][0];
    let lane = if job["write"]["total_ios"].as_u64() > Some(0) { &job["write"] } else { &job["read"] };
    let number = |of: &Value, name: &str| of[name].as_f64().ok_or_else(|| format!("fio printed no {name}"));
    let busy = (number(job, "usr_cpu")? + number(job, "sys_cpu")?) / 100.0;
    let cpu_us = busy * number(job, "job_runtime")? * 1e3;
    Ok(Point {
        iops: number(lane, "iops")?,
        bytes_per_s: number(lane, "bw_bytes")?,
        server_cpu_us: cpu_us / number(lane, "total_ios")?,
        p50_us: lane["lat_ns"]["percentile"]["50.000000"].as_f64().unwrap_or(f64::NAN) / 1e3,
        all,
    })
}

/// CPU seconds of all programs that this one has run so far.
fn children_cpu_s() -> Result<f64> {
    const TICKS_PER_S: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").map_err(|error| format!("/proc/self/stat: {error}"))?;
    children_ticks(&stat).map(|ticks| ticks / TICKS_PER_S).ok_or_else(|| format!("/proc/self/stat: {stat}"))
}

/// Fields 16 and 17 of proc(5)'s stat, counted behind the name, which may hold anything.
fn children_ticks(stat: &str) -> Option<f64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(13);
    let (user, system): (f64, f64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(user + system)
}

/// What fio takes before and after the load, measured once.
fn start_up_cpu_s(side: &Side, image: &Path) -> Result<f64> {
    static SECONDS: OnceLock<f64> = OnceLock::new();
    if let Some(seconds) = SECONDS.get() {
        return Ok(*seconds);
    }
    let before_s = children_cpu_s()?;
    shell::output(command(side, image).args(["--rw=read", "--bs=4k", "--number_ios=1"]))?;
    let seconds = children_cpu_s()? - before_s;
    Ok(*SECONDS.get_or_init(|| seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_fio_is_read() {
        let text = r#"note: something
            {"jobs":[{"usr_cpu":25.0,"sys_cpu":50.0,"job_runtime":2000,
              "read":{"total_ios":0,"iops":0,"bw_bytes":0},
              "write":{"total_ios":3000,"iops":1500.0,"bw_bytes":6144000,
                       "lat_ns":{"percentile":{"50.000000":700}}}}]}"#;
        let point = read(text).expect("the sample is whole");
        assert_eq!((point.iops, point.bytes_per_s, point.p50_us), (1500.0, 6_144_000.0, 0.7));
        assert_eq!(point.server_cpu_us, 500.0);
        assert!(read("no report").is_err());
    }

    #[test]
    fn the_childrens_ticks_are_found_behind_any_name() {
        let stat = "7 (a) 9 b) S 1 1 1 0 -1 4 5 6 7 8 100 200 31 11 20 0 1 0";
        assert_eq!(children_ticks(stat), Some(42.0));
        assert_eq!(children_ticks("7 (a) S 1"), None);
    }
}
