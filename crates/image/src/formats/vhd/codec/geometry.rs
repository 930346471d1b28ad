//! The CHS geometry of old BIOSes, which the footer must carry (the specification's appendix "CHS Calculation").

use super::SECTOR_BYTES;

/// Cylinders, heads and sectors per track.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Cylinders.
    pub cylinders: u16,
    /// Heads per cylinder.
    pub heads: u8,
    /// Sectors per track.
    pub sectors: u8,
}

impl Geometry {
    /// The largest geometry: it stands for "too large for CHS", about 127 GiB and up.
    pub const MAX: Self = Self { cylinders: 65535, heads: 16, sectors: 255 };

    /// The geometry that the specification's appendix gives for a disk of `size_bytes`. Its product is at most
    /// the size, and less for most sizes.
    pub fn for_size(size_bytes: u64) -> Self {
        let sectors = size_bytes.div_ceil(SECTOR_BYTES).clamp(1, Self::MAX.sectors_total());
        let (tracks, heads, per_track) =
            if sectors >= 65535 * 16 * 63 { (sectors / 255, 16, 255) } else { Self::for_small(sectors) };
        // Both fit: the tracks are at most 65535 * 16, the constants are bytes.
        Self { cylinders: u16::try_from(tracks / heads).unwrap_or(u16::MAX), heads: heads as u8, sectors: per_track }
    }

    /// Tracks, heads, sectors per track of a disk that fits 63 sectors per track: the smallest of 17, 31 and 63
    /// that keeps the cylinders below 1024, if one does.
    fn for_small(sectors: u64) -> (u64, u64, u8) {
        let tracks = sectors / 17;
        let heads = tracks.div_ceil(1024).max(4);
        if tracks < heads * 1024 && heads <= 16 {
            return (tracks, heads, 17);
        }
        let tracks = sectors / 31;
        if tracks < 16 * 1024 { (tracks, 16, 31) } else { (sectors / 63, 16, 63) }
    }

    /// The product in sectors.
    fn sectors_total(self) -> u64 {
        u64::from(self.cylinders) * u64::from(self.heads) * u64::from(self.sectors)
    }

    /// The bytes that the geometry addresses.
    pub fn size_bytes(&self) -> u64 {
        self.sectors_total() * SECTOR_BYTES
    }

    /// True for the geometry that only says "large": the size must be taken from elsewhere.
    pub fn is_max(&self) -> bool {
        *self == Self::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Sizes in bytes with the geometry that blktap and Windows write for them.
    const KNOWN: [(u64, (u16, u8, u8)); 7] = [
        (512, (0, 4, 17)),
        (1 << 20, (30, 4, 17)),
        (1 << 30, (2080, 16, 63)),
        (10 << 30, (20805, 16, 63)),
        (127 << 30, (65278, 16, 255)),
        (128 << 30, (65535, 16, 255)),
        (2040 << 30, (65535, 16, 255)),
    ];

    #[test]
    fn known_sizes() {
        for (size, (cylinders, heads, sectors)) in KNOWN {
            assert_eq!(Geometry::for_size(size), Geometry { cylinders, heads, sectors }, "{size}");
        }
    }

    #[test]
    fn nothing_is_larger_than_the_largest() {
        assert!(Geometry::for_size(u64::MAX).is_max());
        assert_eq!(Geometry::MAX.size_bytes(), 65535 * 16 * 255 * 512);
        assert_eq!(Geometry::for_size(0), Geometry { cylinders: 0, heads: 4, sectors: 17 });
    }

    proptest! {
        /// What the product loses is less than one cylinder: geometry is a truncation, never more.
        #[test]
        fn the_product_is_the_size_less_a_part_of_a_cylinder(sectors in 1u64..65535 * 16 * 255) {
            let g = Geometry::for_size(sectors * 512);
            let cylinder = u64::from(g.heads) * u64::from(g.sectors) * 512;
            prop_assert!(g.size_bytes() <= sectors * 512);
            prop_assert!(sectors * 512 - g.size_bytes() < cylinder);
        }
    }
}
