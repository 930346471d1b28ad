//! The digests of a manifest as text: sixteen hexadecimal digits each.

use std::collections::BTreeMap;

use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::ser::{SerializeMap as _, Serializer};

pub(super) fn serialize<S: Serializer>(digests: &BTreeMap<u64, u64>, to: S) -> Result<S::Ok, S::Error> {
    let mut map = to.serialize_map(Some(digests.len()))?;
    for (piece, digest) in digests {
        map.serialize_entry(piece, &format_args!("{digest:016x}"))?;
    }
    map.end()
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<u64, u64>, D::Error> {
    from.deserialize_map(Digests)
}

struct Digests;

impl<'de> Visitor<'de> for Digests {
    type Value = BTreeMap<u64, u64>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("digests by the numbers of pieces")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut digests = BTreeMap::new();
        while let Some((piece, text)) = map.next_entry::<u64, String>()? {
            let digest = u64::from_str_radix(&text, 16);
            digests.insert(piece, digest.map_err(|_| A::Error::custom(format_args!("{text:?} is no digest")))?);
        }
        Ok(digests)
    }
}
