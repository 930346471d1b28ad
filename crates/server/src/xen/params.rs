//! The key `params` of a back end, in which a toolstack says which disk it means.

use std::path::PathBuf;

use spile_core::{Error, ErrorKind, Locator, Result};
use spile_image::Format;

use crate::disks::DiskSpec;

/// Prefixes that name a format, ours and those that toolstacks write.
const PREFIXES: &[(&str, Format)] =
    &[("vhd:", Format::Vhd), ("qcow2:", Format::Qcow2), ("raw:", Format::Raw), ("aio:", Format::Raw)];

/// The disk that `params` means: `[vhd:|qcow2:|raw:|aio:]PATH`, `null:SIZE` or `mem:SIZE`. Without a prefix the extension tells the
/// format.
///
/// # Errors
/// `InvalidInput` when it is nothing of these.
pub fn parse(params: &str, read_only: bool) -> Result<DiskSpec> {
    // libxl puts this in front of the text that it was given for a tap disk.
    let rest = params.strip_prefix("tap:").unwrap_or(params);
    let prefixed = PREFIXES.iter().find_map(|(prefix, format)| Some((rest.strip_prefix(prefix)?, *format)));
    let (source, format) = match prefixed {
        Some((path, format)) if !path.is_empty() => (Locator::Path(PathBuf::from(path)), Some(format)),
        _ => {
            let bad = |why| Error::new(ErrorKind::InvalidInput, format!("params are {params:?}: {why}"));
            (rest.parse().map_err(bad)?, None)
        }
    };
    Ok(DiskSpec { format, read_only, ..DiskSpec::new(source) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_name_the_format() {
        let spec = |text: &str| parse(text, false).unwrap();
        assert_eq!(spec("vhd:/a/b.raw").format, Some(Format::Vhd));
        assert_eq!(spec("tap:qcow2:/dev/storage/vm").format, Some(Format::Qcow2));
        assert_eq!(spec("tap:aio:/a").source, Locator::Path("/a".into()));
        assert_eq!(spec("/a/b.vhd").format, None);
        assert_eq!(spec("null:1M").source, Locator::Null(1 << 20));
        for bad in ["", "null:x", "vhd:", "qcow2:", "tap:"] {
            assert!(parse(bad, false).is_err() || parse(bad, false).unwrap().format.is_none(), "{bad:?}");
        }
        assert!(parse("", false).is_err());
    }
}
