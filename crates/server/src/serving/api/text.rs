//! What a server has counted, as lines for its log.

use super::types::{DiskDetail, Meter, Operation};
use super::view::View;
use crate::units::format_us;

/// A line for each disk, and one for each layer of it and kind of request.
pub fn statistics(view: &View) -> Vec<String> {
    match view.details("") {
        Ok(disks) if disks.is_empty() => vec!["statistics: no disk is served".to_owned()],
        Ok(disks) => disks.iter().flat_map(of_disk).collect(),
        Err(error) => vec![format!("statistics: {error}")],
    }
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
