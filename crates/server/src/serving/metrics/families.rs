//! Families of series, in the types of Prometheus's protobuf exposition (`io.prometheus.client`, metrics.proto of
//! prometheus/client_model). Only the fields that are used are here: a reader passes over what is left out.

use prost::Message;
use spile_core::{Error, ErrorKind, Result};

/// All series of one name.
#[derive(Clone, PartialEq, Message)]
pub struct Family {
    /// The name, with its unit, and `_total` for counters.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// What it means.
    #[prost(string, optional, tag = "2")]
    pub help: Option<String>,
    /// How it behaves over time.
    #[prost(enumeration = "Kind", optional, tag = "3")]
    pub kind: Option<i32>,
    /// The series.
    #[prost(message, repeated, tag = "4")]
    pub series: Vec<Series>,
}

/// How a metric behaves over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Kind {
    /// It only rises, for as long as the process lives.
    Counter = 0,
    /// It rises and falls.
    Gauge = 1,
    /// It counts by buckets.
    Histogram = 4,
}

/// One series: its labels and its value, which is of the family's kind.
#[derive(Clone, PartialEq, Message)]
pub struct Series {
    /// The labels.
    #[prost(message, repeated, tag = "1")]
    pub labels: Vec<Label>,
    /// The value of a gauge.
    #[prost(message, optional, tag = "2")]
    pub gauge: Option<Number>,
    /// The value of a counter.
    #[prost(message, optional, tag = "3")]
    pub counter: Option<Number>,
    /// The value of a histogram.
    #[prost(message, optional, tag = "7")]
    pub histogram: Option<Histogram>,
}

/// A label.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub struct Label {
    /// Its name.
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    /// Its value.
    #[prost(string, optional, tag = "2")]
    pub value: Option<String>,
}

/// The value of a gauge or a counter.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Number {
    /// The value.
    #[prost(double, optional, tag = "1")]
    pub value: Option<f64>,
}

/// A histogram: classic buckets, which all formats have, and native ones, which only the protobuf exposition has.
#[derive(Clone, PartialEq, Message)]
pub struct Histogram {
    /// How many values there are.
    #[prost(uint64, optional, tag = "1")]
    pub count: Option<u64>,
    /// All values together.
    #[prost(double, optional, tag = "2")]
    pub sum: Option<f64>,
    /// Classic buckets. The last one, without a bound, is left out: it is `count`.
    #[prost(message, repeated, tag = "3")]
    pub buckets: Vec<Bucket>,
    /// Native buckets: 2^schema of them to each power of two.
    #[prost(sint32, optional, tag = "5")]
    pub schema: Option<i32>,
    /// Values up to this are in the bucket of zero.
    #[prost(double, optional, tag = "6")]
    pub zero_threshold: Option<f64>,
    /// How many values are in the bucket of zero.
    #[prost(uint64, optional, tag = "7")]
    pub zero_count: Option<u64>,
    /// Which native buckets there are.
    #[prost(message, repeated, tag = "12")]
    pub spans: Vec<Span>,
    /// The counts of these buckets, each as its difference from the one before.
    #[prost(sint64, repeated, packed = "false", tag = "13")]
    pub deltas: Vec<i64>,
}

/// A classic bucket.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Bucket {
    /// How many values are at most the bound.
    #[prost(uint64, optional, tag = "1")]
    pub cumulative_count: Option<u64>,
    /// The bound.
    #[prost(double, optional, tag = "2")]
    pub upper_bound: Option<f64>,
}

/// Native buckets beside each other.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Span {
    /// How many buckets are left out before the first one; for the first span, the number of its first bucket.
    #[prost(sint32, optional, tag = "1")]
    pub offset: Option<i32>,
    /// How many buckets there are.
    #[prost(uint32, optional, tag = "2")]
    pub len: Option<u32>,
}

impl Label {
    /// A label.
    pub fn new(name: &str, value: &str) -> Self {
        Self { name: Some(name.to_owned()), value: Some(value.to_owned()) }
    }
}

/// The value of a series.
pub enum Value {
    /// Of a counter.
    Counter(f64),
    /// Of a gauge.
    Gauge(f64),
    /// Of a histogram.
    Histogram(Histogram),
}

/// All families, in the order in which their first series were added.
#[derive(Default)]
pub struct Families(Vec<Family>);

impl Families {
    /// Adds a series. All series of a name have the same kind and meaning.
    pub fn add(&mut self, name: &str, help: &str, labels: &[Label], value: Value) {
        let (mut series, kind) = match value {
            Value::Counter(value) => {
                (Series { counter: Some(Number { value: Some(value) }), ..Series::default() }, Kind::Counter)
            }
            Value::Gauge(value) => {
                (Series { gauge: Some(Number { value: Some(value) }), ..Series::default() }, Kind::Gauge)
            }
            Value::Histogram(value) => (Series { histogram: Some(value), ..Series::default() }, Kind::Histogram),
        };
        series.labels = labels.to_vec();
        match self.0.iter_mut().find(|family| family.name() == name) {
            Some(family) => family.series.push(series),
            None => self.0.push(Family {
                name: Some(name.to_owned()),
                help: Some(help.to_owned()),
                kind: Some(kind.into()),
                series: vec![series],
            }),
        }
    }

    /// Adds the series of `other` to the family of its name.
    pub fn merge(&mut self, other: Family) {
        match self.0.iter_mut().find(|family| family.name() == other.name()) {
            Some(family) => family.series.extend(other.series),
            None => self.0.push(other),
        }
    }

    /// The families.
    pub fn into_vec(self) -> Vec<Family> {
        self.0
    }
}

/// The protobuf exposition: each family behind its length.
pub fn encode(families: &[Family]) -> Vec<u8> {
    families.iter().flat_map(Message::encode_length_delimited_to_vec).collect()
}

/// The families of a protobuf exposition.
///
/// # Errors
/// `Protocol` when it is none.
pub fn decode(mut bytes: &[u8]) -> Result<Vec<Family>> {
    let mut families = Vec::new();
    while !bytes.is_empty() {
        let family = Family::decode_length_delimited(&mut bytes);
        families.push(family.map_err(|e| Error::new(ErrorKind::Protocol, "metrics are not understood").caused_by(e))?);
    }
    Ok(families)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_protocol() {
        let mut families = Families::default();
        families.add("a", "b", &[Label::new("l", "v")], Value::Gauge(0.0));
        families.add("a", "b", &[], Value::Gauge(1.0));
        let metric = b"\x0a\x06\x0a\x01l\x12\x01v\x12\x09\x09\0\0\0\0\0\0\0\0";
        let other = b"\x12\x09\x09\0\0\0\0\0\0\xf0\x3f";
        let head = b"\x0a\x01a\x12\x01b\x18\x01\x22";
        let mut expected = vec![0];
        expected.extend_from_slice(head);
        expected.push(metric.len() as u8);
        expected.extend_from_slice(metric);
        expected.push(0x22);
        expected.push(other.len() as u8);
        expected.extend_from_slice(other);
        expected[0] = expected.len() as u8 - 1;
        let families = families.into_vec();
        assert_eq!(encode(&families), expected);
        assert_eq!(decode(&expected).unwrap(), families);
        assert!(decode(&expected[..20]).is_err());
    }
}
