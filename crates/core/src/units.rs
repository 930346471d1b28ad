//! Sizes as people read them.

/// Writes a size with a binary unit and at most two digits after the point: `20 GiB`, `1.5 MiB`, `512 B`.
pub fn format_size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = if bytes == 0 { 0 } else { bytes.ilog2() as usize / 10 };
    let value = bytes as f64 / (1u64 << (10 * unit)) as f64;
    let digits = format!("{value:.2}");
    let digits = digits.trim_end_matches('0').trim_end_matches('.');
    format!("{digits} {}", UNITS[unit])
}
