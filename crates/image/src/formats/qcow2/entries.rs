//! What the entries of an L2 table refer to, for work that goes through whole tables.

use std::ops::Range;

use super::codec::table::{Cluster, Compressed, Rules};

/// The entries of the L2 table `words` that can be followed: the number of each one's first word, and what it says.
fn clusters<'a>(rules: &'a Rules, words: &'a [u64]) -> impl Iterator<Item = (usize, Cluster)> + 'a {
    let step = if rules.extended { 2 } else { 1 };
    (0..).step_by(step).zip(words.chunks_exact(step)).filter_map(|(at, entry)| {
        let cluster = rules.cluster(entry[0], entry.get(1).copied().unwrap_or(0));
        Some((at, cluster.ok()?))
    })
}

/// The entries of an L2 table that have a place of their own, whose COPIED bit says whether its refcount is 1: the number of each one's
/// first word, and the place.
pub(super) fn places<'a>(rules: &'a Rules, words: &'a [u64]) -> impl Iterator<Item = (usize, u64)> + 'a {
    clusters(rules, words).filter_map(|(at, cluster)| Some((at, host_of(&cluster)?)))
}

/// The clusters of the file that the entries of an L2 table refer to, entry by entry: each range counts once in its clusters. Those of a data
/// file are not counted.
pub(super) fn references<'a>(rules: &'a Rules, words: &'a [u64]) -> impl Iterator<Item = Range<u64>> + 'a {
    let bits = rules.cluster_bits;
    clusters(rules, words).filter_map(move |(_, cluster)| match cluster {
        Cluster::Compressed(place) => Some(clusters_of(place, bits)),
        _ if rules.data_file => None,
        cluster => host_of(&cluster).map(|host| host >> bits..(host >> bits) + 1),
    })
}

/// The place that is a cluster's, whether it has data there or not; `None` where it has none, or is compressed.
pub(super) fn host_of(cluster: &Cluster) -> Option<u64> {
    match *cluster {
        Cluster::Data(host) => Some(host),
        Cluster::Zero(host) | Cluster::Mixed { host, .. } => host,
        Cluster::Unallocated | Cluster::Compressed(_) => None,
    }
}

/// The clusters of the file that compressed data lie in, each of which counts them once.
pub(super) fn clusters_of(place: Compressed, bits: u32) -> Range<u64> {
    place.offset >> bits..((place.offset + place.len_bytes - 1) >> bits) + 1
}
