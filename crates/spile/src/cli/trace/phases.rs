//! The times of a trace's phases, as the article by Karcygwins has them: the fastest and the slowest fifth of the requests are left
//! out, and the means are of the rest. So one request that had bad luck does not hide where the time goes, and the means of the
//! phases still add up to that of the latency. Percentiles of all requests stand beside them.

use serde::Serialize;
use spile_core::metrics::span::PHASES;
use spile_server::serving::api::trace::TracedRequest;
use utoipa::ToSchema;

/// The phases before the guest can see the answer; the last one comes after it.
const OF_LATENCY: usize = PHASES.len() - 1;

/// What was found of one kind of request.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
pub struct OperationPhases {
    /// `read`, `write`, `flush`, `discard`, `write_zeroes`, `extents` or `other`.
    pub operation: String,
    /// Requests that were traced.
    pub requests: u64,
    /// Of these, how many failed.
    pub errors: u64,
    /// From the moment when a request was taken to the one when its answer was shown.
    pub latency: PhaseFigures,
    /// The phases in order. All but the last one, `notify`, add up to the latency.
    pub phases: Vec<PhaseFigures>,
}

/// The times of one phase.
#[derive(Debug, PartialEq, Serialize, ToSchema)]
pub struct PhaseFigures {
    /// `load`, `queue`, `map`, `store`, `commit`, `unload`, `answer`, `notify`; `latency` for all but the last one together.
    pub name: String,
    /// What happens in it.
    pub about: String,
    /// The mean without the fastest and the slowest fifth of the requests, in microseconds.
    pub mean_us: f64,
    /// The mean as a share of the latency's, in per cent; `null` for what is not part of the latency.
    pub share_percent: Option<f64>,
    /// Half of all requests took no longer, in microseconds.
    pub p50_us: f64,
    /// 99 % of all requests took no longer, in microseconds.
    pub p99_us: f64,
    /// The longest time of any request, in microseconds.
    pub max_us: f64,
}

/// The figures of each kind of request, the most frequent first.
pub fn of(requests: &[TracedRequest]) -> Vec<OperationPhases> {
    let mut names: Vec<&str> = requests.iter().map(|request| request.operation.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let of_kind = |name: &&str| requests.iter().filter(|request| request.operation == *name).collect();
    let mut all: Vec<_> = names.iter().map(of_kind).map(of_operation).collect();
    all.sort_by_key(|operation| std::cmp::Reverse(operation.requests));
    all
}

/// From the moment when a request was taken to the one when its answer was shown, in nanoseconds.
pub fn latency_ns(request: &TracedRequest) -> u64 {
    request.phases_ns.iter().take(OF_LATENCY).sum()
}

fn of_operation(mut requests: Vec<&TracedRequest>) -> OperationPhases {
    requests.sort_by_key(|request| latency_ns(request));
    let fifth = requests.len() / 5;
    let middle = &requests[fifth..requests.len() - fifth];
    let latency = figures(("latency", "until the guest can see the answer"), &requests, middle, latency_ns);
    let mut phases = Vec::new();
    for (number, phase) in PHASES.iter().enumerate() {
        let time_ns = |request: &TracedRequest| request.phases_ns.get(number).copied().unwrap_or(0);
        let mut figures = figures((phase.name, phase.about), &requests, middle, time_ns);
        let share = 100.0 * figures.mean_us / latency.mean_us;
        figures.share_percent = (number < OF_LATENCY && latency.mean_us > 0.0).then_some(share);
        phases.push(figures);
    }
    OperationPhases {
        operation: requests[0].operation.clone(),
        requests: requests.len() as u64,
        errors: requests.iter().filter(|request| request.failed).count() as u64,
        latency,
        phases,
    }
}

fn figures(
    (name, about): (&str, &str),
    all: &[&TracedRequest],
    middle: &[&TracedRequest],
    time_ns: impl Fn(&TracedRequest) -> u64,
) -> PhaseFigures {
    let mut times: Vec<u64> = all.iter().map(|request| time_ns(request)).collect();
    times.sort_unstable();
    let us = |ns: u64| ns as f64 / 1e3;
    let at = |share: f64| us(times[((times.len() as f64 * share).ceil() as usize).clamp(1, times.len()) - 1]);
    let sum_ns: u64 = middle.iter().map(|request| time_ns(request)).sum();
    PhaseFigures {
        name: name.to_owned(),
        about: about.to_owned(),
        mean_us: us(sum_ns) / middle.len() as f64,
        share_percent: None,
        p50_us: at(0.5),
        p99_us: at(0.99),
        max_us: at(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn request(operation: &str, phases_ns: [u64; 10]) -> TracedRequest {
        TracedRequest {
            queue: 0,
            operation: operation.to_owned(),
            offset_bytes: 0,
            len_bytes: 4096,
            failed: false,
            store_operations: 1,
            taken_ns: 1000,
            phases_ns: phases_ns.to_vec(),
        }
    }

    #[test]
    fn a_fifth_at_each_end_does_not_count_for_the_means() {
        let mut requests: Vec<_> =
            (1..=8).map(|us| request("read", [1000, 0, 0, 0, us * 1000, 0, 0, 0, 0, 500])).collect();
        requests.push(request("read", [1000, 0, 0, 0, 0, 0, 0, 0, 0, 500]));
        requests.push(request("read", [1000, 0, 0, 0, 9_000_000, 0, 0, 0, 0, 500]));
        requests.push(request("flush", [0; 10]));
        let [read, flush] = &of(&requests)[..] else { panic!("two kinds") };
        assert_eq!((read.requests, flush.requests, flush.latency.share_percent), (10, 1, None));
        // Of 0 to 8 and 9000 µs, the middle is 2 to 7.
        let store = &read.phases[4];
        assert_eq!((store.name.as_str(), store.mean_us, store.p50_us, store.max_us), ("store", 4.5, 4.0, 9000.0));
        assert_eq!(read.latency.mean_us, 5.5);
        let sum_us: f64 = read.phases[..OF_LATENCY].iter().map(|phase| phase.mean_us).sum();
        assert!((sum_us - read.latency.mean_us).abs() < 1e-9);
        let shares: f64 = read.phases.iter().filter_map(|phase| phase.share_percent).sum();
        assert!((shares - 100.0).abs() < 1e-9);
    }
}
