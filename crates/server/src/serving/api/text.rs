//! What a server has counted, as lines for its log.

use spile_core::metrics::little;

use super::stats::DiskStats;
use super::types::{DiskDetail, Meter, Operation};
use super::view::View;
use crate::units::format_us;

/// A line for each disk, and one for each layer of it and kind of request.
pub fn statistics(view: &View) -> Vec<String> {
    match view.details("") {
        Ok(disks) if disks.is_empty() => vec!["statistics: no disk is served".to_owned()],
        Ok(disks) => {
            let stats = view.all_stats("").map_or_else(|_| Vec::new(), |all| all.disks);
            disks.iter().flat_map(of_disk).chain(stats.iter().flat_map(gaps)).collect()
        }
        Err(error) => vec![format!("statistics: {error}")],
    }
}

/// A line for each layer whose counts contradict each other.
fn gaps(disk: &DiskStats) -> Vec<String> {
    let found = disk.layers.iter().filter_map(|layer| Some((layer, little(&layer.reading())?)));
    found.map(|(layer, gap)| format!("statistics: disk {:?}, {}: WARNING: {gap}", disk.name, layer.name)).collect()
}

fn of_disk(detail: &DiskDetail) -> Vec<String> {
    let DiskDetail { disk, connections, .. } = detail;
    let head = format!("statistics: disk {:?} ({}): {connections} connections", disk.name, disk.path);
    let meters = detail.meters.iter().flat_map(|meter| meter.operations.iter().map(|op| of_operation(disk, meter, op)));
    std::iter::once(head).chain(meters).collect()
}

fn of_operation(disk: &super::types::Disk, meter: &Meter, op: &Operation) -> String {
    format!(
        "statistics: disk {:?}, {}: {}: {} requests, {} failed, {} in flight, {} bytes; half within {}, 99 % within {}, longest {}",
        disk.name,
        meter.layer,
        op.operation,
        op.requests,
        op.errors,
        op.in_flight,
        op.bytes,
        format_us(op.latency_p50_us),
        format_us(op.latency_p99_us),
        format_us(op.latency_max_us),
    )
}

#[cfg(test)]
mod tests {
    use spile_core::metrics::{Counters, Ended, Op};

    use super::super::stats::{LayerKind, LayerStats};
    use super::*;

    #[test]
    fn a_layer_whose_counts_contradict_each_other_is_told() {
        let counters = Counters::default();
        counters.begin(Op::Read, 512, 1000);
        counters.end(Ended { op: Op::Read, failed: false, begun_ns: 1000 }, 5000);
        let good = LayerStats::new(LayerKind::Disk, "disk".to_owned(), &counters.read(6000));
        let mut bad = LayerStats { kind: LayerKind::Store, name: "store /a".to_owned(), ..good.clone() };
        // The bucket of half of the time.
        bad.operations[0].latency_buckets = vec![[1984, 1]];
        let disk = |layers| DiskStats { name: "a".to_owned(), pid: 1, layers, ..DiskStats::default() };
        assert_eq!(gaps(&disk(vec![good.clone()])), [""; 0]);
        let told = gaps(&disk(vec![good, bad]));
        assert!(told.len() == 1 && told[0].contains("store /a") && told[0].contains("49.6 %"), "{told:?}");
    }
}
