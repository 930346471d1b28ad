//! Header extensions: typed pieces between the header and the end of the first cluster.

use super::bitmap::BitmapsExtension;
use super::{CodecError, MAX_NAME_BYTES, be32, be64, check_offset, printable};

/// Extension types of the specification.
pub mod kind {
    /// No more extensions follow.
    pub const END: u32 = 0;
    /// The format of the backing file.
    pub const BACKING_FORMAT: u32 = 0xe279_2aca;
    /// Names of features.
    pub const FEATURE_NAMES: u32 = 0x6803_f857;
    /// Where the bitmaps are.
    pub const BITMAPS: u32 = 0x2385_2875;
    /// Where the LUKS header is.
    pub const LUKS: u32 = 0x0537_be77;
    /// The name of the external data file.
    pub const DATA_FILE: u32 = 0x4441_5441;
}

/// Type and length of one extension.
const HEAD_BYTES: usize = 8;
/// The length of one entry of the table of feature names.
const FEATURE_BYTES: usize = 48;

/// One extension as it is in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Its type ([`kind`]).
    pub kind: u32,
    /// Its data, without padding.
    pub data: Vec<u8>,
}

/// The name that an image gives to one of its feature bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureName {
    /// 0 incompatible, 1 compatible, 2 autoclear.
    pub kind: u8,
    /// 0 to 63.
    pub bit: u8,
    /// Up to 46 bytes.
    pub name: Vec<u8>,
}

impl FeatureName {
    /// The name, fit for a terminal.
    pub fn text(&self) -> String {
        printable(&self.name)
    }

    /// The bytes of its entry; of a name that is too long, the start.
    pub fn to_bytes(&self) -> [u8; 48] {
        let mut out = [0; FEATURE_BYTES];
        (out[0], out[1]) = (self.kind, self.bit);
        let len = self.name.len().min(FEATURE_BYTES - 2);
        out[2..2 + len].copy_from_slice(&self.name[..len]);
        out
    }
}

/// Where the LUKS header lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LuksPlace {
    /// In the image, in bytes.
    pub offset: u64,
    /// In bytes.
    pub len_bytes: u64,
}

/// All extensions of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    /// All of them in the file's order, known or not, so that a header can be written again with nothing lost.
    pub all: Vec<Extension>,
    /// The format of the backing file.
    pub backing_format: Option<Vec<u8>>,
    /// Names of features.
    pub feature_names: Vec<FeatureName>,
    /// Where the bitmaps are.
    pub bitmaps: Option<BitmapsExtension>,
    /// Where the LUKS header is.
    pub luks: Option<LuksPlace>,
    /// The name of the external data file.
    pub data_file: Option<Vec<u8>>,
}

impl Extensions {
    /// Reads the extensions in `area`: the first cluster from the end of the header up to the backing file's name, or
    /// to the end of the cluster where there is none.
    ///
    /// # Errors
    /// `ExtensionLength`, `ExtensionTwice`, and what is wrong with the content of a known one.
    pub fn parse(area: &[u8], cluster_bits: u32) -> Result<Self, CodecError> {
        let mut found = Self { all: split(area)?, ..Self::default() };
        for at in 0..found.all.len() {
            let Extension { kind, ref data } = found.all[at];
            if is_known(kind) && found.all[..at].iter().any(|other| other.kind == kind) {
                return Err(CodecError::ExtensionTwice(kind));
            }
            match kind {
                kind::BACKING_FORMAT => found.backing_format = Some(name("backing format", data)?),
                kind::DATA_FILE => found.data_file = Some(name("data file name", data)?),
                kind::FEATURE_NAMES => found.feature_names = feature_names(data),
                kind::BITMAPS => found.bitmaps = Some(BitmapsExtension::parse(data, cluster_bits)?),
                kind::LUKS => found.luks = Some(luks_place(data, cluster_bits)?),
                _ => {}
            }
        }
        Ok(found)
    }

    /// The bytes of all extensions, with the one that ends them.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for extension in &self.all {
            out.extend(extension.kind.to_be_bytes());
            out.extend((extension.data.len() as u32).to_be_bytes());
            out.extend(&extension.data);
            out.resize(out.len().next_multiple_of(8), 0);
        }
        out.extend([0; HEAD_BYTES]);
        out
    }
}

fn is_known(kind: u32) -> bool {
    [kind::BACKING_FORMAT, kind::FEATURE_NAMES, kind::BITMAPS, kind::LUKS, kind::DATA_FILE].contains(&kind)
}

/// Only the names of features, as far as the area can be read: for the message on an image that cannot be opened.
pub fn feature_names_of(area: &[u8]) -> Vec<FeatureName> {
    let (mut at, mut names) = (0, Vec::new());
    while let Ok(Some((extension, next))) = next(area, at) {
        if extension.kind == kind::FEATURE_NAMES {
            names = feature_names(&extension.data);
        }
        at = next;
    }
    names
}

fn split(area: &[u8]) -> Result<Vec<Extension>, CodecError> {
    let (mut at, mut all) = (0, Vec::new());
    while let Some((extension, next)) = next(area, at)? {
        all.push(extension);
        at = next;
    }
    Ok(all)
}

/// The extension at `at` and where the next one starts; `None` at the end.
fn next(area: &[u8], at: usize) -> Result<Option<(Extension, usize)>, CodecError> {
    let Some(rest) = area.get(at..).filter(|rest| rest.len() >= HEAD_BYTES) else { return Ok(None) };
    let (kind, len_bytes) = (be32(rest, 0), be32(rest, 4));
    if kind == kind::END {
        return Ok(None);
    }
    let data = rest[HEAD_BYTES..].get(..len_bytes as usize);
    let data = data.ok_or(CodecError::ExtensionLength { kind, len_bytes })?.to_vec();
    let next = at + (HEAD_BYTES + data.len()).next_multiple_of(8);
    Ok(Some((Extension { kind, data }, next)))
}

fn name(what: &'static str, data: &[u8]) -> Result<Vec<u8>, CodecError> {
    match data.len() {
        1..=MAX_NAME_BYTES if !data.contains(&0) => Ok(data.to_vec()),
        _ => Err(CodecError::Name(what)),
    }
}

/// What is left over behind the last whole entry is ignored: the table serves messages only.
fn feature_names(data: &[u8]) -> Vec<FeatureName> {
    let entry = |entry: &[u8]| {
        let end = entry[2..].iter().position(|byte| *byte == 0).map_or(entry.len(), |nul| nul + 2);
        FeatureName { kind: entry[0], bit: entry[1], name: entry[2..end].to_vec() }
    };
    data.chunks_exact(FEATURE_BYTES).map(entry).collect()
}

fn luks_place(data: &[u8], cluster_bits: u32) -> Result<LuksPlace, CodecError> {
    let wrong = |field, value| CodecError::ExtensionField { what: "LUKS header", field, value };
    if data.len() < 16 {
        return Err(wrong("length", data.len() as u64));
    }
    let place = LuksPlace { offset: be64(data, 0), len_bytes: be64(data, 8) };
    check_offset("LUKS header", place.offset, cluster_bits)?;
    match place.offset.checked_add(place.len_bytes) {
        Some(_) => Ok(place),
        None => Err(wrong("length", place.len_bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_of(list: &[(u32, &[u8])]) -> Vec<u8> {
        let all = list.iter().map(|(kind, data)| Extension { kind: *kind, data: data.to_vec() }).collect();
        Extensions { all, ..Extensions::default() }.to_bytes()
    }

    #[test]
    fn known_extensions_are_read_and_unknown_ones_kept() {
        let mut names = vec![0, 9];
        names.extend(b"very new thing\0\0");
        names.resize(48, 0);
        let bytes = bytes_of(&[
            (kind::BACKING_FORMAT, b"raw"),
            (0x7661_7465, b"\x01\x02\x03"),
            (kind::FEATURE_NAMES, &names),
            (kind::DATA_FILE, b"d.raw"),
            (0x7661_7465, b"again"),
        ]);
        let found = Extensions::parse(&bytes, 16).unwrap();
        assert_eq!(found.backing_format.as_deref(), Some(&b"raw"[..]));
        assert_eq!(found.data_file.as_deref(), Some(&b"d.raw"[..]));
        let name = FeatureName { kind: 0, bit: 9, name: b"very new thing".to_vec() };
        assert_eq!((&found.feature_names[..], feature_names_of(&bytes)), (&[name.clone()][..], vec![name]));
        assert_eq!(found.all[1], Extension { kind: 0x7661_7465, data: vec![1, 2, 3] });
        assert_eq!(found.to_bytes(), bytes);
    }

    #[test]
    fn lengths_past_the_area_are_refused_before_anything_is_allocated() {
        for len_bytes in [0xffff_ffff, 0x7fff_ffff, 17u32] {
            let mut bytes = bytes_of(&[(7, b"sixteen bytes ok")]);
            bytes.truncate(24);
            bytes[4..8].copy_from_slice(&len_bytes.to_be_bytes());
            assert_eq!(Extensions::parse(&bytes, 16), Err(CodecError::ExtensionLength { kind: 7, len_bytes }));
        }
    }

    #[test]
    fn known_extensions_may_appear_once() {
        let bytes = bytes_of(&[(kind::BACKING_FORMAT, b"raw"), (kind::BACKING_FORMAT, b"qcow2")]);
        assert_eq!(Extensions::parse(&bytes, 16), Err(CodecError::ExtensionTwice(kind::BACKING_FORMAT)));
    }

    #[test]
    fn names_without_bytes_or_with_a_nul_are_refused() {
        for data in [&b""[..], b"a\0b", &[b'x'; 1024]] {
            let bytes = bytes_of(&[(kind::DATA_FILE, data)]);
            assert_eq!(Extensions::parse(&bytes, 16), Err(CodecError::Name("data file name")));
        }
    }

    #[test]
    fn a_luks_header_needs_a_place() {
        let place = |offset: u64, len: u64| [offset.to_be_bytes(), len.to_be_bytes()].concat();
        let parse = |data: &[u8]| Extensions::parse(&bytes_of(&[(kind::LUKS, data)]), 16).map(|found| found.luks);
        assert_eq!(parse(&place(1 << 16, 592)), Ok(Some(LuksPlace { offset: 1 << 16, len_bytes: 592 })));
        assert!(parse(&place(1 << 16, u64::MAX)).is_err() && parse(&place(512, 592)).is_err());
        assert!(parse(&place(1 << 16, 1)[..15]).is_err());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(list in proptest::collection::vec((1u32..99, proptest::collection::vec(any::<u8>(), 0..40)), 0..9)) {
            let list: Vec<(u32, &[u8])> = list.iter().map(|(kind, data)| (*kind, &data[..])).collect();
            let bytes = bytes_of(&list);
            let found = Extensions::parse(&bytes, 16).unwrap();
            prop_assert_eq!(found.all.len(), list.len());
            prop_assert_eq!(found.to_bytes(), bytes);
        }
    }
}
