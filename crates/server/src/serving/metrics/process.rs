//! What the server's process takes of the host, under the names that Prometheus's client libraries have for it.

use std::fs;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

use super::families::{Families, Value};

/// Adds what /proc says of this process; nothing where it cannot be read.
pub fn collect(families: &mut Families) {
    let Some(stat) = fs::read_to_string("/proc/self/stat").ok().as_deref().and_then(Stat::parse) else { return };
    let ticks = clock_ticks_per_second() as f64;
    let mut add = |name: &str, help: &str, value: Option<f64>| {
        let value =
            value.map(|value| if name.ends_with("_total") { Value::Counter(value) } else { Value::Gauge(value) });
        value.into_iter().for_each(|value| families.add(name, help, &[], value));
    };
    let started = boot_unix_s().map(|boot_s| boot_s + stat.start_ticks / ticks);
    add("process_start_time_seconds", "When the process began, in seconds since 1970-01-01 UTC.", started);
    add("process_cpu_seconds_total", "Processor time of all threads.", Some(stat.cpu_ticks / ticks));
    add("process_threads", "Threads.", Some(stat.threads));
    add("process_resident_memory_bytes", "Memory of the host that is in use.", Some(stat.pages * page_size() as f64));
    add("process_virtual_memory_bytes", "Address space that is in use.", Some(stat.virtual_bytes));
    let open = fs::read_dir("/proc/self/fd").ok().map(|fds| fds.count() as f64);
    add("process_open_fds", "Open descriptors.", open);
    let most = getrlimit(Resource::Nofile).current.map(|most| most as f64);
    add("process_max_fds", "The most descriptors that may be open.", most);
}

/// Fields of /proc/self/stat (proc(5)).
struct Stat {
    cpu_ticks: f64,
    threads: f64,
    start_ticks: f64,
    virtual_bytes: f64,
    pages: f64,
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The program's name may have spaces and parentheses. The first field behind it is field 3.
        let fields: Vec<f64> =
            text.rsplit_once(')')?.1.split_whitespace().map(|field| field.parse().unwrap_or(0.0)).collect();
        let field = |number: usize| fields.get(number - 3).copied();
        Some(Self {
            cpu_ticks: field(14)? + field(15)?,
            threads: field(20)?,
            start_ticks: field(22)?,
            virtual_bytes: field(23)?,
            pages: field(24)?,
        })
    }
}

/// When the host was started, in seconds since 1970-01-01 UTC.
fn boot_unix_s() -> Option<f64> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    text.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn this_process_is_alive() {
        let mut families = Families::default();
        collect(&mut families);
        let families = families.into_vec();
        let value = |name: &str| {
            let series =
                &families.iter().find(|family| family.name() == name).unwrap_or_else(|| panic!("{name}")).series[0];
            series.counter.or(series.gauge).unwrap().value.unwrap()
        };
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        // The kernel knows the host's start to a second.
        assert!(
            value("process_start_time_seconds") <= now_s + 1.0 && value("process_start_time_seconds") > now_s - 1e6
        );
        assert!(value("process_threads") >= 1.0 && value("process_open_fds") >= 3.0);
        assert!(value("process_resident_memory_bytes") > 1e5);
        assert!(value("process_virtual_memory_bytes") >= value("process_resident_memory_bytes"));
        assert!(value("process_max_fds") >= value("process_open_fds"));
        assert!(value("process_cpu_seconds_total") >= 0.0);
    }

    #[test]
    fn a_name_with_spaces_and_parentheses_does_no_harm() {
        let text = "7 (a ) b) S 1 7 7 0 -1 0 9 0 0 0 30 12 0 0 20 0 5 0 1000 4096000 250 18446744073709551615";
        let stat = Stat::parse(text).unwrap();
        let found = [stat.cpu_ticks, stat.threads, stat.start_ticks, stat.virtual_bytes, stat.pages];
        assert_eq!(found, [42.0, 5.0, 1000.0, 4_096_000.0, 250.0]);
        assert!(Stat::parse("7 (a) S 1").is_none() && Stat::parse("").is_none());
    }
}
