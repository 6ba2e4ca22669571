"""Countries with capital, continent, currency and main language, written from general knowledge.

Where a country has several official languages, the one most widely used officially is listed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Country:
    name: str
    capital: str
    continent: str
    currency: str
    language: str


_TABLE = """
Afghanistan|Kabul|Asia|afghani|Pashto
Albania|Tirana|Europe|lek|Albanian
Algeria|Algiers|Africa|dinar|Arabic
Andorra|Andorra la Vella|Europe|euro|Catalan
Angola|Luanda|Africa|kwanza|Portuguese
Argentina|Buenos Aires|South America|peso|Spanish
Armenia|Yerevan|Asia|dram|Armenian
Australia|Canberra|Oceania|dollar|English
Austria|Vienna|Europe|euro|German
Azerbaijan|Baku|Asia|manat|Azerbaijani
Bahrain|Manama|Asia|dinar|Arabic
Bangladesh|Dhaka|Asia|taka|Bengali
Barbados|Bridgetown|North America|dollar|English
Belarus|Minsk|Europe|ruble|Belarusian
Belgium|Brussels|Europe|euro|Dutch
Belize|Belmopan|North America|dollar|English
Benin|Porto-Novo|Africa|franc|French
Bhutan|Thimphu|Asia|ngultrum|Dzongkha
Bolivia|Sucre|South America|boliviano|Spanish
Bosnia|Sarajevo|Europe|mark|Bosnian
Botswana|Gaborone|Africa|pula|English
Brazil|Brasilia|South America|real|Portuguese
Brunei|Bandar Seri Begawan|Asia|dollar|Malay
Bulgaria|Sofia|Europe|euro|Bulgarian
Burundi|Gitega|Africa|franc|Kirundi
Cambodia|Phnom Penh|Asia|riel|Khmer
Cameroon|Yaounde|Africa|franc|French
Canada|Ottawa|North America|dollar|English
Chad|N'Djamena|Africa|franc|French
Chile|Santiago|South America|peso|Spanish
China|Beijing|Asia|yuan|Chinese
Colombia|Bogota|South America|peso|Spanish
Comoros|Moroni|Africa|franc|Comorian
Congo|Brazzaville|Africa|franc|French
Costa Rica|San Jose|North America|colon|Spanish
Croatia|Zagreb|Europe|euro|Croatian
Cuba|Havana|North America|peso|Spanish
Cyprus|Nicosia|Asia|euro|Greek
Czechia|Prague|Europe|koruna|Czech
Denmark|Copenhagen|Europe|krone|Danish
Djibouti|Djibouti City|Africa|franc|French
Dominica|Roseau|North America|dollar|English
East Timor|Dili|Asia|dollar|Tetum
Ecuador|Quito|South America|dollar|Spanish
Egypt|Cairo|Africa|pound|Arabic
El Salvador|San Salvador|North America|dollar|Spanish
Equatorial Guinea|Malabo|Africa|franc|Spanish
Eritrea|Asmara|Africa|nakfa|Tigrinya
Estonia|Tallinn|Europe|euro|Estonian
Eswatini|Mbabane|Africa|lilangeni|Swazi
Ethiopia|Addis Ababa|Africa|birr|Amharic
Fiji|Suva|Oceania|dollar|Fijian
Finland|Helsinki|Europe|euro|Finnish
France|Paris|Europe|euro|French
Gabon|Libreville|Africa|franc|French
Gambia|Banjul|Africa|dalasi|English
Georgia|Tbilisi|Asia|lari|Georgian
Germany|Berlin|Europe|euro|German
Ghana|Accra|Africa|cedi|English
Greece|Athens|Europe|euro|Greek
Grenada|Saint George's|North America|dollar|English
Guatemala|Guatemala City|North America|quetzal|Spanish
Guinea|Conakry|Africa|franc|French
Guinea-Bissau|Bissau|Africa|franc|Portuguese
Guyana|Georgetown|South America|dollar|English
Haiti|Port-au-Prince|North America|gourde|French
Honduras|Tegucigalpa|North America|lempira|Spanish
Hungary|Budapest|Europe|forint|Hungarian
Iceland|Reykjavik|Europe|krona|Icelandic
India|New Delhi|Asia|rupee|Hindi
Indonesia|Jakarta|Asia|rupiah|Indonesian
Iran|Tehran|Asia|rial|Persian
Iraq|Baghdad|Asia|dinar|Arabic
Ireland|Dublin|Europe|euro|English
Israel|Jerusalem|Asia|shekel|Hebrew
Italy|Rome|Europe|euro|Italian
Ivory Coast|Yamoussoukro|Africa|franc|French
Jamaica|Kingston|North America|dollar|English
Japan|Tokyo|Asia|yen|Japanese
Jordan|Amman|Asia|dinar|Arabic
Kazakhstan|Astana|Asia|tenge|Kazakh
Kenya|Nairobi|Africa|shilling|Swahili
Kiribati|Tarawa|Oceania|dollar|English
Kosovo|Pristina|Europe|euro|Albanian
Kuwait|Kuwait City|Asia|dinar|Arabic
Kyrgyzstan|Bishkek|Asia|som|Kyrgyz
Laos|Vientiane|Asia|kip|Lao
Latvia|Riga|Europe|euro|Latvian
Lebanon|Beirut|Asia|pound|Arabic
Lesotho|Maseru|Africa|loti|Sotho
Liberia|Monrovia|Africa|dollar|English
Libya|Tripoli|Africa|dinar|Arabic
Liechtenstein|Vaduz|Europe|franc|German
Lithuania|Vilnius|Europe|euro|Lithuanian
Luxembourg|Luxembourg City|Europe|euro|Luxembourgish
Madagascar|Antananarivo|Africa|ariary|Malagasy
Malawi|Lilongwe|Africa|kwacha|English
Malaysia|Kuala Lumpur|Asia|ringgit|Malay
Maldives|Male|Asia|rufiyaa|Dhivehi
Mali|Bamako|Africa|franc|Bambara
Malta|Valletta|Europe|euro|Maltese
Mauritania|Nouakchott|Africa|ouguiya|Arabic
Mauritius|Port Louis|Africa|rupee|English
Mexico|Mexico City|North America|peso|Spanish
Micronesia|Palikir|Oceania|dollar|English
Moldova|Chisinau|Europe|leu|Romanian
Monaco|Monaco City|Europe|euro|French
Mongolia|Ulaanbaatar|Asia|tugrik|Mongolian
Montenegro|Podgorica|Europe|euro|Montenegrin
Morocco|Rabat|Africa|dirham|Arabic
Mozambique|Maputo|Africa|metical|Portuguese
Myanmar|Naypyidaw|Asia|kyat|Burmese
Namibia|Windhoek|Africa|dollar|English
Nauru|Yaren|Oceania|dollar|Nauruan
Nepal|Kathmandu|Asia|rupee|Nepali
Netherlands|Amsterdam|Europe|euro|Dutch
New Zealand|Wellington|Oceania|dollar|English
Nicaragua|Managua|North America|cordoba|Spanish
Niger|Niamey|Africa|franc|Hausa
Nigeria|Abuja|Africa|naira|English
North Korea|Pyongyang|Asia|won|Korean
North Macedonia|Skopje|Europe|denar|Macedonian
Norway|Oslo|Europe|krone|Norwegian
Oman|Muscat|Asia|rial|Arabic
Pakistan|Islamabad|Asia|rupee|Urdu
Palau|Ngerulmud|Oceania|dollar|Palauan
Panama|Panama City|North America|balboa|Spanish
Papua New Guinea|Port Moresby|Oceania|kina|English
Paraguay|Asuncion|South America|guarani|Spanish
Peru|Lima|South America|sol|Spanish
Poland|Warsaw|Europe|zloty|Polish
Portugal|Lisbon|Europe|euro|Portuguese
Qatar|Doha|Asia|riyal|Arabic
Romania|Bucharest|Europe|leu|Romanian
Russia|Moscow|Europe|ruble|Russian
Rwanda|Kigali|Africa|franc|Kinyarwanda
Saint Lucia|Castries|North America|dollar|English
Samoa|Apia|Oceania|tala|Samoan
San Marino|San Marino City|Europe|euro|Italian
Saudi Arabia|Riyadh|Asia|riyal|Arabic
Senegal|Dakar|Africa|franc|French
Serbia|Belgrade|Europe|dinar|Serbian
Seychelles|Victoria|Africa|rupee|French
Sierra Leone|Freetown|Africa|leone|English
Singapore|Singapore City|Asia|dollar|English
Slovakia|Bratislava|Europe|euro|Slovak
Slovenia|Ljubljana|Europe|euro|Slovene
Solomon Islands|Honiara|Oceania|dollar|English
Somalia|Mogadishu|Africa|shilling|Somali
South Africa|Pretoria|Africa|rand|Zulu
South Korea|Seoul|Asia|won|Korean
South Sudan|Juba|Africa|pound|English
Spain|Madrid|Europe|euro|Spanish
Sri Lanka|Kotte|Asia|rupee|Sinhala
Sudan|Khartoum|Africa|pound|Arabic
Suriname|Paramaribo|South America|dollar|Dutch
Sweden|Stockholm|Europe|krona|Swedish
Switzerland|Bern|Europe|franc|German
Syria|Damascus|Asia|pound|Arabic
Taiwan|Taipei|Asia|dollar|Chinese
Tajikistan|Dushanbe|Asia|somoni|Tajik
Tanzania|Dodoma|Africa|shilling|Swahili
Thailand|Bangkok|Asia|baht|Thai
Togo|Lome|Africa|franc|French
Tonga|Nuku'alofa|Oceania|paanga|Tongan
Trinidad|Port of Spain|North America|dollar|English
Tunisia|Tunis|Africa|dinar|Arabic
Turkey|Ankara|Asia|lira|Turkish
Turkmenistan|Ashgabat|Asia|manat|Turkmen
Tuvalu|Funafuti|Oceania|dollar|Tuvaluan
Uganda|Kampala|Africa|shilling|English
Ukraine|Kyiv|Europe|hryvnia|Ukrainian
Uruguay|Montevideo|South America|peso|Spanish
Uzbekistan|Tashkent|Asia|sum|Uzbek
Vanuatu|Port Vila|Oceania|vatu|Bislama
Venezuela|Caracas|South America|bolivar|Spanish
Vietnam|Hanoi|Asia|dong|Vietnamese
Yemen|Sanaa|Asia|rial|Arabic
Zambia|Lusaka|Africa|kwacha|English
Zimbabwe|Harare|Africa|dollar|English
"""

COUNTRIES = tuple(Country(*line.split("|")) for line in _TABLE.strip().splitlines())
RELATIONS = ("capital", "continent", "currency", "language")


def answer(country: Country, relation: str) -> str:
    """The sentence that answers a question about a country."""
    value = getattr(country, relation)
    if relation == "continent":
        return f"{country.name} is in {value}."
    if relation == "language":
        return f"The main language of {country.name} is {value}."
    article = "the " if relation == "currency" else ""
    return f"The {relation} of {country.name} is {article}{value}."
