//! [`METRICS`]: the name, unit and meaning of each number, for whoever exports or prints readings.
//!
//! Names are in snake_case and end in their unit, which is a base unit (seconds, bytes); sums that only rise end in
//! `_total`. They follow the conventions of Prometheus. Whoever exports them adds what they were counted of: the disk,
//! the place (a front, a disk, a layer, a store), and the operation ([`super::Op::name`]).

use super::{Latency, OpReading, Reading};

/// How a number behaves over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It only rises, for as long as the process lives.
    Counter,
    /// It rises and falls.
    Gauge,
    /// It is a histogram, with a count and a sum.
    Histogram,
}

/// What a number is measured in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A count of requests.
    Requests,
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
}

/// Where a number is found.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    /// One for all kinds of request.
    Whole(fn(&Reading) -> f64),
    /// One for each kind of request.
    PerOp(fn(&OpReading) -> f64),
    /// A histogram for each kind of request. Its nanoseconds are to be divided by 10^9.
    Latency(fn(&OpReading) -> &Latency),
}

/// One number that readings have.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// How it behaves over time.
    pub kind: Kind,
    /// What it is measured in.
    pub unit: Unit,
    /// What it means.
    pub help: &'static str,
    /// Where it is found.
    pub value: Value,
}

/// All numbers of a [`Reading`].
pub const METRICS: [Metric; 8] = [
    Metric {
        name: "requests_total",
        kind: Kind::Counter,
        unit: Unit::Requests,
        help: "Requests that have ended, with success or not.",
        value: Value::PerOp(|op| op.ended as f64),
    },
    Metric {
        name: "requests_begun_total",
        kind: Kind::Counter,
        unit: Unit::Requests,
        help: "Requests that have begun.",
        value: Value::PerOp(|op| op.begun as f64),
    },
    Metric {
        name: "request_errors_total",
        kind: Kind::Counter,
        unit: Unit::Requests,
        help: "Requests that have failed.",
        value: Value::PerOp(|op| op.errors as f64),
    },
    Metric {
        name: "request_bytes_total",
        kind: Kind::Counter,
        unit: Unit::Bytes,
        help: "Bytes that requests asked for when they began.",
        value: Value::PerOp(|op| op.bytes as f64),
    },
    Metric {
        name: "requests_in_flight",
        kind: Kind::Gauge,
        unit: Unit::Requests,
        help: "Requests that have begun and not ended.",
        value: Value::PerOp(|op| op.in_flight as f64),
    },
    Metric {
        name: "request_depth_seconds_total",
        kind: Kind::Counter,
        unit: Unit::Seconds,
        help: "Requests in flight, integrated over time. Its rise in a time, divided by that time, is the average queue depth.",
        value: Value::Whole(|reading| reading.depth_integral_ns as f64 / 1e9),
    },
    Metric {
        name: "request_duration_seconds",
        kind: Kind::Histogram,
        unit: Unit::Seconds,
        help: "Time from the begin of a request to its end.",
        value: Value::Latency(|op| &op.latency),
    },
    Metric {
        name: "request_duration_max_seconds",
        kind: Kind::Gauge,
        unit: Unit::Seconds,
        help: "The longest time from the begin of a request to its end, since counting began.",
        value: Value::PerOp(|op| op.latency.max_ns as f64 / 1e9),
    },
];

#[cfg(test)]
mod tests {
    use super::super::{Counters, Ended, Op};
    use super::*;

    #[test]
    fn names_follow_the_conventions() {
        for metric in &METRICS {
            let name = metric.name;
            assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
            assert_eq!(name.ends_with("_total"), metric.kind == Kind::Counter, "{name}");
            let unit = match metric.unit {
                Unit::Requests => "request",
                Unit::Bytes => "bytes",
                Unit::Seconds => "seconds",
            };
            assert!(name.contains(unit) && metric.help.ends_with('.'), "{name}");
            assert_eq!(METRICS.iter().filter(|other| other.name == name).count(), 1, "{name}");
        }
    }

    #[test]
    fn each_name_finds_its_number() {
        let counters = Counters::default();
        counters.begin(Op::Write, 4096, 0);
        counters.begin(Op::Write, 4096, 0);
        counters.end(Ended { op: Op::Write, failed: true, begun_ns: 0 }, 2_000_000_000);
        let reading = counters.read(3_000_000_000);
        let numbers = METRICS.iter().map(|metric| match metric.value {
            Value::Whole(of) => of(&reading),
            Value::PerOp(of) => of(reading.op(Op::Write)),
            Value::Latency(of) => of(reading.op(Op::Write)).count() as f64,
        });
        assert_eq!(numbers.collect::<Vec<_>>(), [1.0, 2.0, 1.0, 8192.0, 1.0, 5.0, 1.0, 2.0]);
    }
}
